"""The three models of Sphere Retraction Normalizations (arXiv 2608.02668), on OpenWebText and on FineWeb-Edu.

Second hand: nanoGPT as the code base; 12, 24 and 36 blocks, named small, medium and large; both corpora; about 6.55
billion tokens; the schemes compared, except Post-LN, which is ours. Read in nanoGPT's code: the widths and heads of
GPT-2's sizes, context 1024, vocabulary 50304, AdamW's betas, weight decay 0.1, clipping at 1, cosine decay to a tenth,
OpenWebText's held-out share of 0.0005 (guessed to be the same for FineWeb-Edu). Derived: 6.5536e9 tokens as 12,500
steps of 524,288, one of several ways to divide them. Guessed: that these widths were used; the batch; learning rates of
6e-4, 3e-4 and 2.5e-4 (those of GPT-3's models of these sizes, from memory), the same for every scheme; 2000 steps of
warm-up. Ours: initial weights by the scheme's own rule (`--init nanogpt` is nanoGPT's), evaluation, and micro-batches
that fit a GPU of 80 GB. A scheme as its paper states it is a preset: `--scheme proj:preset=paper`.
"""

from __future__ import annotations

from spheret.recipes.base import Recipe
from spheret.training.settings import RunSettings

SCHEMES = ("proj", "cay", "geonorm", "pre-ln", "post-ln", "pre-dyt", "peri-ln", "keel")
OPENWEBTEXT, FINEWEB_EDU = "openwebtext", "fineweb-edu"
TITLES = {OPENWEBTEXT: "OpenWebText", FINEWEB_EDU: "FineWeb-Edu"}


def small_12l(scheme: str = "proj", *, corpus: str = OPENWEBTEXT) -> Recipe:
    """12 blocks (second hand) of width 768 with 12 heads (GPT-2 small's, read; guessed that the paper used it).

    Learning rate 6e-4 (guessed).
    """
    return _recipe("small", 12, 12, 768, 6e-4, 32, scheme, corpus)


def medium_24l(scheme: str = "proj", *, corpus: str = OPENWEBTEXT) -> Recipe:
    """24 blocks (second hand) of width 1024 with 16 heads (GPT-2 medium's, read; guessed that the paper used it).

    Learning rate 3e-4 (guessed). Reported on FineWeb-Edu: a perplexity of 19.09 with Peri-LN and of 16.81 with
    Proj-SpheretNorm (second hand).
    """
    return _recipe("medium", 24, 16, 1024, 3e-4, 64, scheme, corpus)


def large_36l(scheme: str = "proj", *, corpus: str = OPENWEBTEXT) -> Recipe:
    """36 blocks (second hand) of width 1280 with 20 heads (GPT-2 large's, read; guessed that the paper used it).

    Learning rate 2.5e-4 (guessed).
    """
    return _recipe("large", 36, 20, 1280, 2.5e-4, 64, scheme, corpus)


def _recipe(
    size: str, n_layer: int, n_head: int, n_embd: int, lr: float, grad_accum: int, scheme: str, corpus: str
) -> Recipe:
    if corpus not in TITLES:
        raise ValueError(f"corpus = {corpus!r}: choose one of {', '.join(TITLES)}")
    settings = RunSettings(
        data=(corpus,),
        tokenizer="gpt2",
        vocab_multiple=64,
        val_fraction=0.0005,
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        block_size=1024,
        steps=12_500,
        batch_size=512,
        grad_accum=grad_accum,
        warmup_steps=2000,
        # Explicit, so that they also hold for schemes that by default train in another way.
        weight_decay=0.1,
        qkv_lr=0.0,
        mlp_out_lr=0.0,
        eval_interval=500,
        eval_windows=512,
        checkpoint_interval=500,
    )
    title = f"SpheretNorm's {size} model, {TITLES[corpus]}"
    return Recipe(title=title, settings=settings, scheme=scheme, schemes=SCHEMES, lr=lr)
