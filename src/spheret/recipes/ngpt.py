"""nGPT's two sizes on OpenWebText (arXiv 2410.01131), for nGPT, GPT+ and anGPT.

Read in the authors' code: context 1024, vocabulary 50304, batches of 512 x 1024 tokens, cosine decay to 0, and for nGPT
no weight decay and no warm-up, which the scheme sets itself. Read off their plot: 50,000 steps, one of several lengths.
OpenWebText's held-out share of 0.0005: read in nanoGPT's code, and guessed to be theirs as well. Ours: micro-batches
that fit a GPU of 80 GB, evaluation, and the learning rates of the other schemes.
"""

from __future__ import annotations

from spheret.connections import canonical_name
from spheret.recipes.base import Recipe
from spheret.training.settings import RunSettings

SCHEMES = ("ngpt", "gpt-qknorm", "angpt")


def half_billion(scheme: str = "ngpt") -> Recipe:
    """24 blocks of width 1024 with 16 heads, their "0.5B" (read in the authors' launcher).

    Learning rate of nGPT: 15e-4, the default of their code (read). Their launcher has 30e-4.
    """
    return _recipe("0.5B", 24, 16, 1024, 64, scheme)


def one_billion(scheme: str = "ngpt") -> Recipe:
    """36 blocks of width 1280 with 20 heads, their "1B" (guessed, from memory of the paper).

    Learning rate of nGPT: 15e-4, the default of their code (read). That it holds at this size is guessed, as are batch
    and steps.
    """
    return _recipe("1B", 36, 20, 1280, 64, scheme)


def _recipe(size: str, n_layer: int, n_head: int, n_embd: int, grad_accum: int, scheme: str) -> Recipe:
    settings = RunSettings(
        data=("openwebtext",),
        tokenizer="gpt2",
        vocab_multiple=64,
        val_fraction=0.0005,
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        block_size=1024,
        steps=50_000,
        batch_size=512,
        grad_accum=grad_accum,
        min_lr_ratio=0.0,
        eval_interval=500,
        eval_windows=512,
        checkpoint_interval=500,
    )
    return Recipe(
        title=f"nGPT's {size} model, OpenWebText",
        settings=settings,
        scheme=scheme,
        schemes=SCHEMES,
        lr=15e-4 if canonical_name(scheme) == "ngpt" else None,
    )
