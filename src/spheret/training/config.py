"""The configuration of one training run: frozen, checked when built, the same in Python, in JSON and as flags.

`RunSettings` and the commands take their defaults from here. The defaults give a run of seconds on a CPU, because a
first run should end while its user watches. Longer runs come from recipes or flags.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from spheret.connections.registry import with_defaults_of_format_1
from spheret.data import DataConfig
from spheret.models import GPTConfig
from spheret.models.config import use_python_numbers
from spheret.training.optimizer import ScheduleKind, learning_rate

FORMAT = 3
"""Of config.json. `config_from_dict` says what was otherwise in the earlier formats."""
Switch = Literal["auto", "on", "off"]
ComputeType = Literal["auto", "float32", "bfloat16"]
OnDivergence = Literal["stop", "continue"]


@dataclass(frozen=True)
class TrainConfig:
    """Everything needed to repeat a run. ValueError: a value out of range; the message says what to use instead."""

    model: GPTConfig = field(default_factory=GPTConfig)
    """The model, including its scheme."""
    data: DataConfig = field(default_factory=DataConfig)
    """The corpus and its tokenizer."""
    seed: int = 1
    """Decides the initial weights, the order of the batches and dropout."""
    init_from: str = ""
    """Folder of a run or a checkpoint with the same model: the new run starts from its weights. '': from the seed's."""
    steps: int = 150
    """Optimizer steps."""
    max_train_tokens: int = 0
    """Upper bound on the tokens trained on; lowers the number of steps. 0: no bound."""
    batch_size: int = 4
    """Sequences per optimizer step, over all micro-batches."""
    grad_accum: int = 1
    """Micro-batches per optimizer step. More of them need less memory; the gradient stays the same."""
    lr: float = 6.3e-3
    """Peak learning rate. The default is `default_lr` at the default width, 0.8 / 128."""
    qkv_lr: float = 0.0
    """Largest peak learning rate of the projections to queries, keys and values. 0: no bound."""
    mlp_out_lr: float = 0.0
    """Largest peak learning rate of the MLPs' last projections, which sum over 4d inputs. 0: no bound."""
    min_lr_ratio: float = 0.1
    """The decay ends at this share of the peak learning rate."""
    schedule: ScheduleKind = "cosine"
    """cosine; wsd: constant, then linear decay; constant: no decay."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; None: `warmup_ratio` decides."""
    warmup_ratio: float = 0.1
    """Linear warm-up as a share of all steps; ignored if `warmup_steps` is given."""
    decay_fraction: float = 0.2
    """Share of the steps over which the wsd schedule decays."""
    weight_decay: float = 0.1
    """Decoupled weight decay, applied to the parameters whose role is to decay."""
    beta1: float = 0.9
    """AdamW's decay rate of the mean gradient."""
    beta2: float = 0.95
    """AdamW's decay rate of the mean squared gradient."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    eval_interval: int = 50
    """Steps between evaluations; 0: only at the end."""
    eval_windows: int = 64
    """Validation windows of one context each, the same at every evaluation; fewer if they would overlap."""
    log_interval: int = 10
    """Steps between lines of metrics.jsonl."""
    checkpoint_interval: int = 500
    """Steps between checkpoints; 0: none during training, so an interrupted run starts over."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints to keep; 0: all."""
    save_final: bool = True
    """Save a checkpoint of the finished model."""
    on_divergence: OnDivergence = "stop"
    """stop: end a diverged run at once; continue: train to the last step."""
    device: str = "auto"
    """auto (CUDA if available), cpu, cuda or cuda:N."""
    dtype: ComputeType = "auto"
    """Compute dtype; auto: bfloat16 on GPUs that support it, else float32. Parameters are always float32."""
    compile: Switch = "auto"
    """torch.compile; auto: on CUDA only. Falls back to eager mode with a warning."""

    def __post_init__(self) -> None:
        use_python_numbers(self)
        _check_ranges(self)
        _check_choices(self)
        _require(
            self.grad_accum <= self.batch_size,
            f"grad_accum={self.grad_accum} exceeds batch_size={self.batch_size}; lower grad_accum",
        )
        _require(
            self.max_train_tokens == 0 or self.max_train_tokens >= self.tokens_per_step,
            f"max_train_tokens={self.max_train_tokens} is less than one step of {self.tokens_per_step} tokens; "
            "raise it or lower batch_size",
        )
        _require(
            self.warmup_steps is None or float(self.warmup_steps).is_integer(),
            f"warmup_steps={self.warmup_steps} is not a whole number; use warmup_ratio for a share of all steps",
        )
        name = "warmup_ratio" if self.warmup_steps is None else "warmup_steps"
        _require(
            self.total_warmup_steps < self.total_steps,
            f"{name}={getattr(self, name)} leaves no step at full learning rate in {self.total_steps} steps; "
            f"lower {name}",
        )

    @property
    def tokens_per_step(self) -> int:
        """Training tokens per optimizer step."""
        return self.batch_size * self.model.block_size

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run, limited by `max_train_tokens`."""
        bound = self.max_train_tokens // self.tokens_per_step if self.max_train_tokens else self.steps
        return min(self.steps, bound)

    @property
    def lr_factors(self) -> dict[str, float]:
        """Factors on `lr`, by kind of weight matrix (`ParameterRole.kind`), that keep `qkv_lr` and `mlp_out_lr`."""
        bounds = {"qkv": self.qkv_lr, "mlp-out": self.mlp_out_lr}
        return {kind: bound / self.lr if 0 < bound < self.lr else 1.0 for kind, bound in bounds.items()}

    @property
    def total_warmup_steps(self) -> int:
        """Steps of linear warm-up, from `warmup_steps` or from `warmup_ratio`."""
        return round(self.warmup_ratio * self.total_steps) if self.warmup_steps is None else self.warmup_steps

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step number `step`, counted from 0."""
        return learning_rate(
            step,
            lr=self.lr,
            steps=self.total_steps,
            warmup_steps=self.total_warmup_steps,
            kind=self.schedule,
            min_lr_ratio=self.min_lr_ratio,
            decay_fraction=self.decay_fraction,
        )


def config_to_dict(config: TrainConfig) -> dict[str, Any]:
    """Nested plain dict of a configuration, ready for JSON."""
    return {"format": FORMAT, **dataclasses.asdict(config)}


def config_from_dict(values: Mapping[str, Any]) -> TrainConfig:
    """Inverse of `config_to_dict`. Omitted fields take their defaults. ValueError: an unknown key or a bad value.

    Configurations of earlier versions can be read: `model.connection` is now `model.scheme`, and `warmup` is now
    `warmup_steps` and `warmup_ratio`. In format 1, which had no key `format`, the sphere schemes had other defaults; in
    format 2, `qkv_lr` and `mlp_out_lr` were factors on `lr`.
    """
    values = dict(values)
    version = values.pop("format", 1)
    _require(version in (1, 2, FORMAT), f"format={version!r} is not known; use the version of spheret that wrote it")
    model = values.get("model")
    if isinstance(model, Mapping) and "connection" in model and "scheme" not in model:
        values["model"] = model = {"scheme" if key == "connection" else key: value for key, value in model.items()}
    if version == 1 and isinstance(model, Mapping) and isinstance(model.get("scheme"), str):
        n_layer = model.get("n_layer", GPTConfig.n_layer)
        if isinstance(n_layer, int) and n_layer > 0:
            values["model"] = {**model, "scheme": with_defaults_of_format_1(model["scheme"], n_layer)}
    if version == 2:
        for name in ("qkv_lr", "mlp_out_lr"):
            values[name] = _bound_of_format_2(name, values.get(name, 1.0), values.get("lr", TrainConfig.lr))
    if "warmup" in values:
        values |= warmup_settings(values.pop("warmup"))
    nested = {"model": GPTConfig, "data": DataConfig}
    built = {key: _build(nested[key], value, f"{key}.") if key in nested else value for key, value in values.items()}
    config: TrainConfig = _build(TrainConfig, built, "")
    return config


def _bound_of_format_2(name: str, factor: Any, lr: Any) -> float:
    """The bound on a learning rate that does what a factor on `lr` did."""
    numbers = isinstance(factor, int | float) and isinstance(lr, int | float)
    _require(
        numbers and 0 < factor <= 1,
        f"{name}={factor} of format 2 is a factor on lr, which must lie in (0, 1]; use the version that wrote it",
    )
    return 0.0 if factor == 1 else factor * lr


def warmup_settings(warmup: float) -> dict[str, Any]:
    """The old setting `warmup` as `warmup_ratio` (below 1: a share of all steps) or `warmup_steps` (a number of steps).

    ValueError: `warmup` is neither a share nor a whole number.
    """
    if warmup < 1:
        return {"warmup_ratio": float(warmup)}
    _require(
        float(warmup).is_integer(),
        f"warmup={warmup}: use warmup_steps for a whole number of steps, or warmup_ratio for a share of all steps",
    )
    return {"warmup_steps": int(warmup)}


def check_types(kind: Any, values: Mapping[str, Any], prefix: str = "") -> None:
    """ValueError: names a value that does not have the type of its field of the dataclass `kind`."""
    for name, hint in get_type_hints(kind).items():
        if name in values and not _fits(values[name], hint):
            shown = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            raise ValueError(f"{prefix}{name}={values[name]!r:.80} is not of type {shown}")


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(value, bool) or hint is bool:  # a bool is an int to Python, but not to us
        return isinstance(value, bool) and (hint is bool or bool in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:  # a list in JSON; a lone string stands for one of them
        return isinstance(value, str) or (isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value))
    return isinstance(value, {int: Integral, float: Real}.get(hint, hint))


def _build(kind: Any, values: Any, prefix: str) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(f"{prefix.rstrip('.')}={values!r:.80} is not a JSON object")
    known = [f.name for f in dataclasses.fields(kind)]
    unknown = [prefix + key for key in values if key not in known]
    if unknown:
        raise ValueError(
            f"unknown configuration keys {', '.join(unknown)}; {kind.__name__} has {', '.join(known)}. "
            "Remove them, or use the version of spheret that wrote them"
        )
    check_types(kind, values, prefix)
    # JSON has no tuples, so a tuple comes back as a list. Frozen configurations hold no other lists.
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


_AT_LEAST: dict[str, float] = {
    **dict.fromkeys(("steps", "batch_size", "grad_accum", "eval_windows", "log_interval"), 1),
    **dict.fromkeys(("max_train_tokens", "eval_interval", "checkpoint_interval", "keep_checkpoints"), 0),
    **dict.fromkeys(("warmup_steps", "warmup_ratio", "decay_fraction", "min_lr_ratio", "qkv_lr", "mlp_out_lr"), 0),
    **dict.fromkeys(("weight_decay", "grad_clip", "beta1", "beta2"), 0),
}
_AT_MOST: dict[str, float] = {"min_lr_ratio": 1, "decay_fraction": 1, "warmup_ratio": 1}


def _check_ranges(config: TrainConfig) -> None:
    # NaN fails every comparison, so each check rejects it too.
    for name, low in _AT_LEAST.items():
        value = getattr(config, name)
        _require(value is None or value >= low, f"{name}={value} is too small; use {low} or more")
    for name, high in _AT_MOST.items():
        value = getattr(config, name)
        _require(value <= high, f"{name}={value} is too large; use {high} or less")
    for name in ("qkv_lr", "mlp_out_lr"):
        value = getattr(config, name)
        _require(value < 0.2, f"{name}={value} is a learning rate, not a factor; use one below 0.2, or 0 for no bound")
    for name in ("beta1", "beta2"):
        value = getattr(config, name)
        _require(value < 1, f"{name}={value} must be below 1; use for example 0.9")
    _require(0 <= config.seed < 2**64, f"seed={config.seed} is out of range; use 0 to {2**64 - 1} (2^64 - 1)")
    _require(0 < config.lr < float("inf"), f"lr={config.lr} must be positive and finite; use for example 3e-3")


def _check_choices(config: TrainConfig) -> None:
    choices = {"schedule": ScheduleKind, "dtype": ComputeType, "compile": Switch, "on_divergence": OnDivergence}
    for name, kind in choices.items():
        value, allowed = getattr(config, name), get_args(kind)
        hint = ". float16 needs a gradient scaler, which this trainer does not have" if value == "float16" else ""
        _require(value in allowed, f"{name}={value!r} is not known; use {', '.join(allowed)}{hint}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
