"""anGPT's ladder of sizes from 32M to 1B parameters (arXiv 2505.22014), for anGPT, GPT+ and nGPT.

Second hand: SlimPajama; context 2048; the GPT-NeoX tokenizer (GPT-2's stands in for it here); cosine decay; the two
ends of the ladder and its 0.5B; SwiGLU, rotary positions and QK normalisation for all schemes. Read in the authors'
abstract: no weight decay and no warm-up for anGPT, which the scheme sets itself. Derived: the numbers of blocks, from
the size. Guessed: all other shapes, the rungs in between, 20 tokens per parameter (Chinchilla's, arXiv 2203.15556),
batches of 524,288 tokens, decay to 0. Ours: learning rates of 0.8/d times each scheme's own factor, micro-batches that
fit a GPU of 80 GB, evaluation. Give the corpus as `--data FOLDER`.
"""

from __future__ import annotations

from functools import partial

from spheret.recipes.base import Recipe
from spheret.training.settings import RunSettings

SCHEMES = ("angpt", "gpt-qknorm", "ngpt")
BLOCK_SIZE, TOKENS_PER_STEP, TOKENS_PER_PARAMETER = 2048, 524_288, 20

# size: parameters, blocks, heads, width, micro-batches
LADDER = {
    "32m": (32e6, 6, 4, 256, 16),  # size second hand, shape guessed
    "62m": (62e6, 10, 6, 384, 16),  # guessed
    "125m": (125e6, 18, 8, 512, 16),  # guessed
    "250m": (250e6, 18, 12, 768, 32),  # guessed
    "0.5b": (500e6, 24, 16, 1024, 64),  # size second hand, shape nGPT's (read there), guessed to be the same
    "1b": (1e9, 36, 20, 1280, 64),  # size second hand, shape guessed
}


def angpt(scheme: str = "angpt", *, size: str) -> Recipe:
    """A rung of the ladder, trained on 20 tokens per parameter (guessed).

    Their longest run trains the 0.5B model on 70 billion tokens (second hand): `--steps 133514`.
    """
    parameters, n_layer, n_head, n_embd, grad_accum = LADDER[size]
    settings = RunSettings(
        data=("slimpajama",),
        tokenizer="gpt2",
        vocab_multiple=64,
        val_fraction=0.0005,
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        block_size=BLOCK_SIZE,
        steps=round(TOKENS_PER_PARAMETER * parameters / TOKENS_PER_STEP),
        batch_size=TOKENS_PER_STEP // BLOCK_SIZE,
        grad_accum=grad_accum,
        min_lr_ratio=0.0,
        eval_interval=500,
        eval_windows=512,
        checkpoint_interval=500,
    )
    title = f"anGPT's ladder at {size.upper()} parameters, SlimPajama"
    return Recipe(title=title, settings=settings, scheme=scheme, schemes=SCHEMES)


RUNGS = {f"angpt-{size}": partial(angpt, size=size) for size in LADDER}
