"""Whether a finished run has collapsed: it stopped learning where a model ends that ignores the context.

Two facts must hold. The run has learned nothing that token frequencies do not give, so its validation loss is not below
their plateau (`unigram_loss`). And it has stopped: the loss does not fall any more. A run that is still falling
towards the plateau is undertrained, and more steps would take it further. A run that stopped far above the plateau has
collapsed only if the states of its tokens became alike, because then it cannot tell one context from another; else its
learning rate may just have been too small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

COLLAPSE_MARGIN = 0.03
"""Share of the unigram loss. A loss less far than this below the plateau has learned nothing; within it, it is near."""
STOPPED_MARGIN = 0.01
"""Share of the unigram loss. A loss that fell by less than this in the second half of the run has stopped."""
ALIKE_COSINE = 0.99
"""Mean cosine between the states of different tokens, after the last sublayer, from which they count as alike."""


def has_collapsed(
    val_loss: float | None,
    unigram_loss: float,
    records: Sequence[Mapping[str, Any]],
    token_cosine: float | None = None,
) -> bool:
    """Whether a run that finished has collapsed.

    Args:
        val_loss: final validation loss in nats per token; None if it is not finite.
        unigram_loss: loss of the token frequencies on the same windows, in nats per token.
        records: metrics of the run in order of step, with `step`, `loss` and, where evaluated, `val_loss`.
        token_cosine: mean cosine between the states of different tokens after the last sublayer, if it was measured.
    """
    if val_loss is None or val_loss <= (1.0 - COLLAPSE_MARGIN) * unigram_loss:
        return False
    fall = fall_in_second_half(records)
    if fall is None or fall >= STOPPED_MARGIN * unigram_loss:  # still falling, or too short to tell
        return False
    near = val_loss < (1.0 + COLLAPSE_MARGIN) * unigram_loss
    alike = token_cosine is not None and token_cosine >= ALIKE_COSINE
    return near or alike


def fall_in_second_half(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Nats per token by which the loss fell between the middle and the end of the run; None if the records are too few.

    The validation loss is used where the first half was evaluated, because its windows are always the same. Otherwise
    it is the training loss: the second quarter of the run minus the last, each averaged over its records.
    """
    if not records:
        return None
    last = records[-1]["step"]
    evaluated = [(r["step"], r["val_loss"]) for r in records if _finite(r.get("val_loss"))]
    early = [loss for step, loss in evaluated if step <= last / 2]
    if early and evaluated[-1][0] == last:
        return float(early[-1] - evaluated[-1][1])
    trained = [(r["step"], r["loss"]) for r in records if _finite(r.get("loss"))]
    middle = [loss for step, loss in trained if last / 4 < step <= last / 2]
    end = [loss for step, loss in trained if 3 * last / 4 < step <= last]
    return fmean(middle) - fmean(end) if middle and end else None


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
