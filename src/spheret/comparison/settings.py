"""Settings of a run as a user types them: one flat list of flags, shared by all commands that train."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

from spheret.connections import parse_scheme
from spheret.data import DataConfig
from spheret.models import GPTConfig
from spheret.training import TrainConfig
from spheret.training.config import ComputeType, Switch
from spheret.training.optimizer import ScheduleKind

WARMUP, WEIGHT_DECAY = 0.1, 0.1
DEFAULT_SHARE = 0.4


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Model, data and budget of a run; what varies (scheme, learning rate, seed) is given to `train_config`."""

    data: tuple[str, ...] = ("stdlib",)
    """Corpus: stdlib (Python's own source), or .txt, .jsonl, .parquet files or folders of them."""
    tokenizer: str = "bytes"
    """bytes, bpe, bpe:<vocabulary>, gpt2 or gpt2:<folder>."""
    vocab_multiple: int = 1
    """Round the model's vocabulary up to a multiple of this; 64, for GPUs, makes 50304 of GPT-2's 50257."""
    text_column: str = "text"
    """Field of .jsonl and .parquet files that holds the text."""
    val_fraction: float = 0.1
    """Share of the documents held out for validation."""
    n_layer: int = 6
    """Blocks."""
    n_head: int = 4
    """Attention heads."""
    n_embd: int = 128
    """Width of the hidden state."""
    block_size: int = 128
    """Context, tokens."""
    dropout: float = 0.0
    """Dropout probability."""
    init: str = "auto"
    """Initial weights: auto (width-aware, by the scheme) or nanogpt."""
    positions: str = "auto"
    """learned embeddings, rope (rotary) or auto: what the scheme wants, else learned."""
    mlp: str = "auto"
    """gelu, swiglu (half as many parameters again) or auto: what the scheme wants, else gelu."""
    qk_norm: str = "auto"
    """Norm of queries and keys: none, rms, l2 or auto: what the scheme wants, else none."""
    head: str = "auto"
    """tied to the token embedding, untied or auto: what the scheme wants, else tied."""
    steps: int = 150
    """Optimizer steps of a run."""
    batch_size: int = 4
    """Sequences per optimizer step."""
    grad_accum: int = 1
    """Micro-batches that a batch is cut into to save memory."""
    schedule: ScheduleKind = "cosine"
    """cosine, wsd (constant, then decay) or constant."""
    warmup: float | None = None
    """Linear warm-up: below 1 a share of all steps, otherwise a number of steps; none given: what the scheme wants,
    else 0.1."""
    min_lr_ratio: float = 0.1
    """The decay ends at this share of the peak learning rate."""
    weight_decay: float | None = None
    """Decoupled weight decay of the weight matrices; none given: what the scheme wants, else 0.1."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    eval_interval: int = 50
    """Steps between evaluations; 0: only at the end."""
    eval_windows: int = 64
    """Validation windows of one block each, the same for every run."""
    checkpoint_interval: int = 0
    """Steps between checkpoints, from which an interrupted run goes on; 0: none while training."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: ComputeType = "auto"
    """Compute dtype; auto: bfloat16 on GPUs that have it, else float32."""
    compile: Switch = "auto"
    """torch.compile; auto: on CUDA only."""

    @property
    def data_config(self) -> DataConfig:
        """Corpus, tokenizer and split."""
        return DataConfig(
            data=self.data, tokenizer=self.tokenizer, val_fraction=self.val_fraction, text_column=self.text_column
        )

    def train_config(
        self, scheme: str, *, lr: float, seed: int, vocab_size: int, save_final: bool = True
    ) -> TrainConfig:
        """Configuration of one run, for a tokenizer of ``vocab_size`` tokens. ValueError: a value out of range, named
        with the fix."""
        if self.vocab_multiple < 1:
            raise ValueError(f"vocab_multiple = {self.vocab_multiple}: give 1 (the tokenizer's own size) or more")
        padded = -(-vocab_size // self.vocab_multiple) * self.vocab_multiple
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(RunSettings)}
        model_fields = {f.name for f in dataclasses.fields(GPTConfig)} & own.keys()
        train_fields = {f.name for f in dataclasses.fields(TrainConfig)} & own.keys() - {"data"}
        model = GPTConfig(vocab_size=padded, scheme=scheme, **{k: own[k] for k in model_fields})
        rest = {k: own[k] for k in train_fields} | self._method(scheme)
        return TrainConfig(model=model, data=self.data_config, lr=lr, seed=seed, save_final=save_final, **rest)

    def _method(self, scheme: str) -> dict[str, float]:
        """Settings that belong to the method of some schemes, where none are given."""
        wanted = parse_scheme(scheme).training(self.n_layer)
        return {
            "warmup": _first(self.warmup, wanted.warmup, WARMUP),
            "weight_decay": _first(self.weight_decay, wanted.weight_decay, WEIGHT_DECAY),
        }


def flags(settings: RunSettings, *, always: Collection[str] = (), never: Collection[str] = ()) -> list[str]:
    """``settings`` as words of a command line; those at their defaults are left out unless they are named ``always``,
    and those named ``never`` in any case."""
    words: list[str] = []
    for f in dataclasses.fields(settings):
        value = getattr(settings, f.name)
        if f.name not in never and (value != f.default or f.name in always):
            values = value if isinstance(value, tuple) else (value,)
            words += [f"--{f.name.replace('_', '-')}", *map(_word, values)]
    return words


def _word(value: object) -> str:
    """A flag's value as one would type it; floats as short as they stay exact."""
    if not isinstance(value, float):
        return str(value)
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def scheme_lr(scheme: str, *, n_embd: int, n_layer: int, share: float = DEFAULT_SHARE) -> float:
    """``default_lr`` times the factor that the scheme asks for at this depth."""
    return default_lr(n_embd, share * parse_scheme(scheme).training(n_layer).lr_factor)


def default_lr(n_embd: int, share: float = DEFAULT_SHARE) -> float:
    """Peak learning rate where none is given, ``share / d`` to two digits: a hidden unit sums over d inputs, so that
    steps of one size in every weight, which are what Adam takes, move it by a share that grows with d."""
    return float(f"{share / n_embd:.2g}")
