"""The tables below that of the schemes: loss over the option of a sweep, and all pairs where they were asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spheret.comparison.statistics import CONFIDENCE, call
from spheret.reporting import table
from spheret.reporting.plots import robust_limits
from spheret.reporting.sweeps import option_places

_STRIP = 36
"""Characters of the strip on which a sweep's losses lie."""
CALL_WORDS = {"better": "better", "worse": "worse", "unclear": "not distinguishable", "unknown": "no verdict"}


def print_side_tables(console: Console, results: Mapping[str, Any]) -> None:
    """Print the table of the sweep and that of all pairs, as far as `results` has them, each after an empty line."""
    for found in (sweep_table(results), pairs_table(results)):
        if found is not None:
            console.print()
            console.print(found, crop=False)


# --- sweep ---


def sweep_table(results: Mapping[str, Any]) -> Table | None:
    """Loss at each value of the sweep's option, in the order of the values, with a strip on which the losses lie."""
    sweep = results.get("sweep")
    if not sweep:
        return None
    rows = {row.scheme: row for row in table.rows(results)}
    points = [(v, rows[n]) for v, n in zip(sweep["values"], sweep["names"], strict=True) if n in rows]
    places = option_places([value for value, _ in points])
    ordered = [point for _, point in sorted(zip(places, points, strict=True), key=lambda both: both[0][0])]
    baseline = table.rows(results)[0]
    shown = [row for _, row in ordered if row.val_loss is not None]
    if not shown:
        return None
    means = [row.val_loss for row in (*shown, baseline) if row.val_loss is not None]
    ends = [x for row in shown for x in _ends(row)]
    low, high = robust_limits(means, ends, widen=1, pad=0)
    result = Table(
        title=Text(f"Loss over {sweep['option']} of {sweep['scheme']}  (| {baseline.scheme}, o mean, - 95% interval)"),
        title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True,
    )  # fmt: skip
    result.add_column(Text(sweep["option"]), justify="right", overflow="fold")
    result.add_column("val loss ± 95%", justify="right", no_wrap=True)
    left, right = f"{low:.3f}", f"{high:.3f}"
    result.add_column(left + " " * (_STRIP - len(left) - len(right)) + right, no_wrap=True)
    for value, row in ordered:
        result.add_row(Text(value), table.loss(row), Text(_strip(row, baseline.val_loss, low, high)))
    return result


def _ends(row: table.Row) -> list[float]:
    if row.val_loss is None or row.half_width is None:
        return []
    return [row.val_loss - row.half_width, row.val_loss + row.half_width]


def _strip(row: table.Row, baseline: float | None, low: float, high: float) -> str:
    """'   ---o-|-  ': interval, mean and the baseline's mean. What lies beyond the scale is put at its edge."""

    def place(x: float) -> int:
        return round(min(max((x - low) / (high - low), 0.0), 1.0) * (_STRIP - 1))

    marks = [" "] * _STRIP
    if ends := _ends(row):
        first, last = map(place, ends)
        marks[first : last + 1] = "-" * (last + 1 - first)
    if baseline is not None and baseline <= high:
        marks[place(baseline)] = "|"
    if row.val_loss is not None:
        marks[place(row.val_loss)] = "o" if row.val_loss <= high else ">"
    return "".join(marks)


# --- all pairs ---


@dataclass(frozen=True)
class PairRow:
    """One pair of schemes: the difference is `scheme` minus `against`."""

    scheme: str
    against: str
    difference: str
    interval: str
    p_holm: str
    call: str


def pair_rows(results: Mapping[str, Any]) -> list[PairRow]:
    """The pairs of results.json; none unless the comparison was asked for them."""
    return [
        PairRow(
            scheme=pair["scheme"],
            against=pair["against"],
            difference=table.number(pair["mean"], "+.4f"),
            interval="" if pair["ci_low"] is None else f"[{pair['ci_low']:+.4f}, {pair['ci_high']:+.4f}]",
            p_holm=table.number(pair["p_holm"], ".2g"),
            call=call(pair),
        )
        for pair in results.get("all_pairs") or ()
    ]


def pairs_note(results: Mapping[str, Any]) -> str:
    """What the figures of the pairs mean."""
    tested = sum(pair["p_value"] is not None for pair in results.get("all_pairs") or ())
    return (
        f"The first scheme minus the second, in nats/token, paired by seed: negative is better. All {tested} intervals "
        f"hold together in {CONFIDENCE:.0%} of comparisons (Bonferroni). p is Holm's, corrected for all pairs, and "
        "decides what is called better or worse; it can do so where the interval just includes zero."
    )


def pairs_table(results: Mapping[str, Any]) -> Table | None:
    """All pairs for the terminal; None unless the comparison was asked for them."""
    pairs = pair_rows(results)
    if not pairs:
        return None
    result = Table(
        title="All pairs", title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False,
        collapse_padding=True, caption=Text(pairs_note(results)), caption_justify="left",
    )  # fmt: skip
    for name in ("scheme", "against"):
        result.add_column(name, overflow="fold", min_width=table.NAME_WIDTH)
    for name in ("difference\n[joint 95% interval]", "p", "at 95%"):  # Text: rich takes some brackets for markup
        result.add_column(Text(name), justify="left" if name == "at 95%" else "right", no_wrap=True)
    for pair in pairs:
        words = Text(CALL_WORDS[pair.call].replace(" ", "\n"), style=table.CALL_STYLE[pair.call])
        difference = Text(f"{pair.difference}\n{pair.interval}".rstrip())
        result.add_row(Text(pair.scheme), Text(pair.against), difference, pair.p_holm, words)
    return result


def pairs_markdown(results: Mapping[str, Any]) -> str:
    """All pairs as GitHub Markdown; empty unless the comparison was asked for them."""
    pairs = pair_rows(results)
    if not pairs:
        return ""
    lines = ["| scheme | against | difference [joint 95% interval] | p | at 95% |", "| --- | --- | ---: | ---: | --- |"]
    for pair in pairs:
        names = [f"`{name}`".replace("|", "\\|") for name in (pair.scheme, pair.against)]
        cells = [*names, f"{pair.difference} {pair.interval}".strip(), pair.p_holm, CALL_WORDS[pair.call]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", pairs_note(results), ""])
