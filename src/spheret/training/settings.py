"""The settings of a run as the user gives them: one flat list, from which every training command makes its flags.

`RunSettings` holds what several runs share. `RunSettings.train_config` adds scheme, learning rate and seed, and returns
the `TrainConfig` of one run. Defaults come from `TrainConfig`, `GPTConfig` and `DataConfig`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from spheret.connections import parse_scheme
from spheret.data import DataConfig, settled
from spheret.models import GPTConfig
from spheret.training.config import ComputeType, Switch, TrainConfig, warmup_settings
from spheret.training.optimizer import ScheduleKind

LR_SHARE = 0.8
"""Default learning rate times width. The best learning rates of the schemes lie between 0.1 and 3.2 in this unit."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Model, data and budget of a run, without scheme, learning rate and seed."""

    data: tuple[str, ...] = DataConfig.data
    """Corpus: stdlib (Python's own source), .txt, .jsonl, .json, .parquet files, folders of them, or prepared data."""
    tokenizer: str = DataConfig.tokenizer
    """bytes, bpe, bpe:<vocabulary>, gpt2 or gpt2:<folder>."""
    vocab_multiple: int = 1
    """Round the model's vocabulary up to a multiple of this. 64 is fast on GPUs and makes 50304 of GPT-2's 50257."""
    text_column: str = DataConfig.text_column
    """Field of .jsonl and .parquet files that holds the text."""
    val_fraction: float = DataConfig.val_fraction
    """Share of the documents held out for validation."""
    n_layer: int = GPTConfig.n_layer
    """Number of blocks, each an attention and an MLP sublayer."""
    n_head: int = GPTConfig.n_head
    """Number of attention heads."""
    n_embd: int = GPTConfig.n_embd
    """Width d of the hidden state."""
    block_size: int = GPTConfig.block_size
    """Context length, tokens."""
    dropout: float = GPTConfig.dropout
    """Dropout probability."""
    init: str = GPTConfig.init
    """Initial weights: auto (the scheme's rule, which follows the width) or nanogpt."""
    positions: str = GPTConfig.positions
    """Positions: learned, rope (rotary), or auto (what the scheme sets, else learned)."""
    mlp: str = GPTConfig.mlp
    """MLP: gelu, swiglu (half as many parameters again), or auto (what the scheme sets, else gelu)."""
    qk_norm: str = GPTConfig.qk_norm
    """Norm of queries and keys: none, rms, l2, or auto (what the scheme sets, else none)."""
    head: str = GPTConfig.head
    """Head: tied to the token embedding, untied, or auto (what the scheme sets, else tied)."""
    steps: int = TrainConfig.steps
    """Optimizer steps of a run."""
    batch_size: int = TrainConfig.batch_size
    """Sequences per optimizer step."""
    grad_accum: int = TrainConfig.grad_accum
    """Micro-batches per optimizer step. More of them need less memory; the gradient stays the same."""
    schedule: ScheduleKind = TrainConfig.schedule
    """Learning-rate schedule: cosine, wsd (constant, then linear decay) or constant."""
    warmup_steps: int | None = None
    """Steps of linear warm-up. Without this and --warmup-ratio: what the scheme sets, else a ratio of 0.1."""
    warmup_ratio: float | None = None
    """Linear warm-up as a share of all steps, instead of --warmup-steps."""
    min_lr_ratio: float = TrainConfig.min_lr_ratio
    """The decay ends at this share of the peak learning rate."""
    decay_fraction: float = TrainConfig.decay_fraction
    """Share of the steps over which the wsd schedule decays."""
    qkv_lr: float | None = None
    """Largest learning rate of queries, keys and values; 0: no bound. If not given: the scheme's (0.4/d, 0.2/d, 0)."""
    mlp_out_lr: float | None = None
    """Largest learning rate of the MLPs' last projections; 0: no bound. If not given: the scheme's, none or 0.4/d."""
    weight_decay: float | None = None
    """Decoupled weight decay of the weight matrices. If not given: what the scheme sets, else 0.1."""
    beta1: float = TrainConfig.beta1
    """AdamW's decay rate of the mean gradient."""
    beta2: float = TrainConfig.beta2
    """AdamW's decay rate of the mean squared gradient."""
    grad_clip: float = TrainConfig.grad_clip
    """Largest global gradient norm. 0 turns clipping off."""
    eval_interval: int = TrainConfig.eval_interval
    """Steps between evaluations. 0 evaluates only at the end."""
    eval_windows: int = TrainConfig.eval_windows
    """Validation windows of one context each, the same for every run."""
    log_interval: int = TrainConfig.log_interval
    """Steps between lines of metrics.jsonl."""
    checkpoint_interval: int = TrainConfig.checkpoint_interval
    """Steps between checkpoints. With 0 there are none during training, and an interrupted run starts over."""
    keep_checkpoints: int = TrainConfig.keep_checkpoints
    """How many of the newest checkpoints to keep. 0 keeps all."""
    device: str = TrainConfig.device
    """auto, cpu, cuda or cuda:N."""
    dtype: ComputeType = TrainConfig.dtype
    """Compute dtype. auto is bfloat16 on GPUs that support it, else float32."""
    compile: Switch = TrainConfig.compile
    """torch.compile. auto compiles on CUDA only."""

    @property
    def data_config(self) -> DataConfig:
        """Corpus, tokenizer and split; of prepared data, those that it was prepared with."""
        return settled(
            DataConfig(
                data=self.data, tokenizer=self.tokenizer, val_fraction=self.val_fraction, text_column=self.text_column
            )
        )

    def train_config(
        self, scheme: str, *, lr: float, seed: int, vocab_size: int, base: TrainConfig | None = None
    ) -> TrainConfig:
        """The configuration of one run, for a tokenizer with ``vocab_size`` tokens. What has no flag comes from `base`.

        ValueError: a value out of range, or an unknown scheme; the message names the fix.
        """
        if self.vocab_multiple < 1:
            raise ValueError(f"vocab_multiple = {self.vocab_multiple}: give 1 (the tokenizer's own size) or more")
        padded = -(-vocab_size // self.vocab_multiple) * self.vocab_multiple
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(RunSettings)}
        model_fields = {f.name for f in dataclasses.fields(GPTConfig)} & own.keys()
        train_fields = {f.name for f in dataclasses.fields(TrainConfig)} & own.keys()
        train_fields -= {"data", "weight_decay", "qkv_lr", "mlp_out_lr", "warmup_steps", "warmup_ratio"}  # see below
        base = base or TrainConfig()
        shape = {k: own[k] for k in model_fields} | {"vocab_size": padded, "scheme": scheme}
        text = {f.name: own[f.name] for f in dataclasses.fields(DataConfig) if f.name in own}
        model, data = dataclasses.replace(base.model, **shape), settled(dataclasses.replace(base.data, **text))
        rest = {k: own[k] for k in train_fields} | self._scheme_settings(scheme)
        return dataclasses.replace(base, model=model, data=data, lr=lr, seed=seed, **rest)

    def _scheme_settings(self, scheme: str) -> dict[str, Any]:
        """Weight decay, warm-up and bounds on learning rates: the user's, else the scheme's, else our defaults."""
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps} and warmup_ratio = {self.warmup_ratio} say the same thing twice: "
                "give one of them"
            )
        wanted = parse_scheme(scheme).training(self.n_layer)
        of_scheme = {
            "weight_decay": wanted.weight_decay,
            "qkv_lr": wanted.qkv_lr / self.n_embd,
            "mlp_out_lr": wanted.mlp_out_lr / self.n_embd,
        }
        chosen = {name: value for name, value in of_scheme.items() if value is not None}
        chosen |= {name: given for name in of_scheme if (given := getattr(self, name)) is not None}
        if self.warmup_steps is not None:
            return {**chosen, "warmup_steps": self.warmup_steps}
        if self.warmup_ratio is not None:
            return {**chosen, "warmup_steps": None, "warmup_ratio": self.warmup_ratio}
        return chosen if wanted.warmup is None else chosen | warmup_settings(wanted.warmup)


def flags(settings: RunSettings, *, always: Collection[str] = (), never: Collection[str] = ()) -> list[str]:
    """``settings`` as the words of a command line.

    Fields named in ``never`` are omitted. So are fields at their defaults, unless they are named in ``always``.
    """
    words: list[str] = []
    for f in dataclasses.fields(settings):
        value = getattr(settings, f.name)
        if f.name not in never and (value != f.default or f.name in always):
            values = () if value is True else value if isinstance(value, tuple) else (value,)
            words += [f"--{f.name.replace('_', '-')}", *map(_word, values)]
    return words


def flags_of(config: TrainConfig) -> list[str]:
    """The words of a command line of `spheret train` that has `config`, apart from what no flag can set."""
    values = {**vars(config), **vars(config.model), **vars(config.data)}
    own = {f.name: values[f.name] for f in dataclasses.fields(RunSettings) if f.name in values}
    own["vocab_multiple"] = config.model.vocab_size  # the tokenizer's vocabulary, rounded up to this
    own["warmup_ratio"] = config.warmup_ratio if config.warmup_steps is None else None
    words = flags(RunSettings(**own))
    for name, value in (("scheme", config.model.scheme), ("lr", config.lr), ("seed", config.seed)):
        words += [f"--{name}", _word(value)]
    return words + (["--init-from", config.init_from] if config.init_from else [])


def _word(value: object) -> str:
    """A flag's value as one would type it; floats in their shortest exact form."""
    if not isinstance(value, float):
        return str(value)
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def scheme_lr(scheme: str, *, n_embd: int, n_layer: int, share: float = LR_SHARE) -> float:
    """``default_lr`` times the scheme's learning-rate factor at this depth."""
    return default_lr(n_embd, share * parse_scheme(scheme).training(n_layer).lr_factor)


def default_lr(n_embd: int, share: float = LR_SHARE) -> float:
    """The default peak learning rate: ``share / n_embd``, rounded to two digits.

    A hidden unit sums over d inputs. Adam moves every weight by about the learning rate, so one step moves the unit by
    an amount that grows with d. Dividing by d keeps this amount the same at every width.
    """
    return float(f"{share / n_embd:.2g}")
