"""The table of a comparison, for the terminal, GitHub and spreadsheets."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from spheret.comparison.reach import TOLERANCE, rates_that_train
from spheret.comparison.statistics import call

MISSING = "-"
NAME_WIDTH, FOLD_NAMES_ABOVE = 12, 30
"""Least width of the column of scheme names, and the length above which a name is folded after every comma."""
CALL_STYLE = {"better": "bold green", "worse": "bold red", "unclear": "yellow", "unknown": "dim"}


@dataclass(frozen=True)
class Row:
    """One scheme: losses in nats/token, `half_width` of the 95% interval, `difference` to the first scheme (paired).

    It trains from `lr_low` to `lr_high`; at an open end, that is the last rate of the grid. `to_baseline` is the share
    of the baseline's steps after which it reaches the baseline's final loss: infinite if never, None if unknown.
    """

    scheme: str
    parameters: int | None
    lr: float | None
    lr_at_edge: bool
    lr_low: float | None
    lr_high: float | None
    lr_open_low: bool | None
    lr_open_high: bool | None
    runs: int
    finished: int
    diverged: int
    interrupted: int
    collapsed: int
    val_loss: float | None
    sd: float | None
    half_width: float | None
    perplexity: float | None
    bits_per_byte: float | None
    difference: float | None
    difference_low: float | None
    difference_high: float | None
    pairs: int | None
    p_value: float | None
    p_holm: float | None
    call: str
    to_baseline: float | None
    steps_to_baseline: float | None
    tokens_to_baseline: float | None
    flops_to_baseline: float | None
    flops_share_to_baseline: float | None


def rows(results: Mapping[str, Any]) -> list[Row]:
    """One row per scheme of results.json, in its order; the first is the baseline."""
    return [_row(entry, is_baseline=i == 0) for i, entry in enumerate(results["schemes"])]


def rich_table(results: Mapping[str, Any], width: int = 100) -> Table:
    """The table for a terminal of `width` columns.

    Columns that do not fit are omitted and named below the table: first bits/byte, then perplexity, the steps to the
    baseline's loss and the learning rates. Then long scheme names are folded. No name or number is ever cut, so below
    about 60 columns the table is wider than `width`.
    """
    shown = list(rows(results))
    columns = [title for title in _COLUMNS if title not in OPTIONAL or any(OPTIONAL[title](row) for row in shown)]
    omitted: list[str] = []
    for title in _DROPPED_IN_TURN:
        if _natural_width(_table(shown, columns)) <= width:
            break
        if title in columns:
            columns.remove(title)
            omitted.append(title.replace("\n", " "))
    table = _table(shown, columns)
    table.width = max(min(width, _natural_width(table)), _least_width(table))
    lines = [_MEANING[title] for title in _MEANING if title in columns]
    if omitted:
        lines.append(f"No room for {', '.join(reversed(omitted))}: see results.csv, or widen the terminal.")
    if lines:
        table.caption, table.caption_justify = Text("\n".join(lines)), "left"
    return table


def print_table(console: Console, results: Mapping[str, Any]) -> None:
    """Print the table at the width of the console."""
    console.print(rich_table(results, console.width), crop=False)


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "scheme": lambda row: row.scheme.replace(",", ",\n") if len(row.scheme) > FOLD_NAMES_ABOVE else row.scheme,
    "best lr": lambda row: lr(row),
    "trains\nfrom, to": lambda row: rate_range(row, separator="\n"),
    "val loss\n± 95%": lambda row: loss(row, separator="\n"),
    "perplexity": lambda row: perplexity(row.perplexity),
    "bits/byte": lambda row: number(row.bits_per_byte, ".4f"),
    "difference\n[95% interval]": lambda row: difference(row, separator="\n"),
    "steps to\nbaseline": lambda row: to_baseline(row, separator="\n"),
    "runs": lambda row: outcomes(row, separator="\n"),
}
OPTIONAL: dict[str, Callable[[Row], bool]] = {
    "trains\nfrom, to": lambda row: row.lr_open_low is not None,
    "steps to\nbaseline": lambda row: row.to_baseline is not None and row.call != "baseline",
}
"""Columns that are shown only if a row has something to say there."""
_MEANING = {
    "trains\nfrom, to": f"Trains from, to: the learning rates that end within {TOLERANCE:g} nats of the scheme's best.",
    "steps to\nbaseline": "Steps to baseline: share of its run after which the mean curve is at its final loss.",
}
_DROPPED_IN_TURN = ("bits/byte", "perplexity", "steps to\nbaseline", "trains\nfrom, to", "best lr")
_HUGE = 10_000  # columns of a console in which nothing wraps, to measure a table


def _table(shown: Sequence[Row], columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for title in columns:
        name = title == "scheme"
        table.add_column(
            title, justify="left" if name else "right", no_wrap=not name, overflow="fold", min_width=NAME_WIDTH * name
        )
    for row in shown:
        # Text, not str: rich would read square brackets as markup.
        styles = {"difference\n[95% interval]": CALL_STYLE.get(row.call, "")}
        table.add_row(*(Text(_COLUMNS[title](row), style=styles.get(title, "")) for title in columns))
    return table


def _natural_width(table: Table) -> int:
    return _measure(table).maximum


def _least_width(table: Table) -> int:
    """The width at which only the scheme names are folded."""
    return _natural_width(table) - _widest(table.columns[0]) + min(NAME_WIDTH, _widest(table.columns[0]))


def _widest(column: Column) -> int:
    return max(cell_len(line) for cell in column.cells for line in str(cell).splitlines() or [""])


def _measure(table: Table) -> Measurement:
    console = Console(width=_HUGE, file=io.StringIO())
    return Measurement.get(console, console.options, table)


def markdown(results: Mapping[str, Any]) -> str:
    """The table as GitHub Markdown, followed by a line that explains the figures."""
    shown = rows(results)
    columns: dict[str, Callable[[Row], str]] = {
        "scheme": lambda row: f"`{row.scheme}`",
        "parameters": lambda row: number(row.parameters, ",d"),
        "best lr": lr,
        "trains from, to": rate_range,
        "val loss": loss,
        "perplexity": lambda row: perplexity(row.perplexity),
        "bits/byte": lambda row: number(row.bits_per_byte, ".4f"),
        "difference [CI]": difference,
        "steps to baseline": to_baseline,
        "runs": outcomes,
    }
    for title, known in OPTIONAL.items():
        if not any(map(known, shown)):
            del columns[title.replace("\n", " ")]
    lines = ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    for row in shown:
        cells = (text(row).replace("|", "\\|").replace("\n", " ") for text in columns.values())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", footnote(results), ""])


def csv_text(results: Mapping[str, Any]) -> str:
    """The rows as CSV with a header, at full precision; unknown values are empty."""
    out = io.StringIO()
    records = [asdict(row) for row in rows(results)]
    writer = csv.DictWriter(out, fieldnames=list(Row.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def footnote(results: Mapping[str, Any]) -> str:
    """The meaning of the table's figures, in one or two sentences."""
    if not results["schemes"]:
        return "No schemes."
    text = (
        "Validation loss in nats/token, mean over the seeds that finished, with its 95% t interval; difference to "
        f"{results['schemes'][0]['scheme']}, paired by seed: negative is better."
    )
    if any(entry.get("lr_at_edge") for entry in results["schemes"]):
        text += " An asterisk marks a learning rate at the edge of the grid."
    shown = rows(results)
    if any(row.lr_open_low is not None for row in shown):
        text += (
            f" A scheme trains at a learning rate if the tuning run ends within {TOLERANCE:g} nats of its best one and "
            "no run at that rate diverged or collapsed; <= and >= mark an end of the grid."
        )
    if any(OPTIONAL["steps to\nbaseline"](row) for row in shown):
        text += (
            f" Steps to baseline: where the mean validation curve reaches the final loss of {shown[0].scheme}, as a "
            "share of its steps, interpolated between evaluations; with the share of its FLOPs where that differs."
        )
    return text


def number(value: float | None, spec: str) -> str:
    """`value` in the format `spec`, or a dash if it is unknown."""
    return MISSING if value is None else format(value, spec)


def lr(row: Row) -> str:
    """The learning rate, with an asterisk if it lies at the edge of the grid."""
    return number(row.lr, "g") + ("*" if row.lr_at_edge else "")


def rate_range(row: Row, separator: str = " to ") -> str:
    """'0.0015 to >=0.012': the learning rates at which the scheme trains; <= and >= mark an end of the grid."""
    if row.lr_open_low is None:
        return MISSING
    if row.lr_low is None or row.lr_high is None:
        return "none"
    low, high = f"{'<=' * row.lr_open_low}{row.lr_low:g}", f"{'>=' * bool(row.lr_open_high)}{row.lr_high:g}"
    if row.lr_low == row.lr_high:
        return high if row.lr_open_high else low
    return f"{low}{separator}{high}"


def to_baseline(row: Row, separator: str = " ") -> str:
    """'61%', '61% (92% FLOPs)' where the operations per step differ, or 'never'."""
    if row.to_baseline is None or row.call == "baseline":
        return MISSING if row.to_baseline is None else ""
    if math.isinf(row.to_baseline):
        return "never"
    steps, flops = f"{row.to_baseline:.0%}", number(row.flops_share_to_baseline, ".0%")
    return steps if flops in (steps, MISSING) else f"{steps}{separator}({flops} FLOPs)"


def loss(row: Row, separator: str = " ") -> str:
    """Mean validation loss, with the half-width of its interval if there is one."""
    return number(row.val_loss, ".4f") + ("" if row.half_width is None else f"{separator}± {row.half_width:.4f}")


def perplexity(value: float | None) -> str:
    """Perplexity with two decimals below 1000. Above, none: such a model has failed."""
    return number(value, ".2f" if value is not None and value < 1000 else ",.0f")


def difference(row: Row, separator: str = " ") -> str:
    """Signed difference, with its interval if there is one."""
    if row.call == "baseline":
        return "baseline"
    interval = ""
    if row.difference_low is not None and row.difference_high is not None:
        interval = f"{separator}[{row.difference_low:+.4f}, {row.difference_high:+.4f}]"
    return number(row.difference, "+.4f") + interval


def outcomes(row: Row, separator: str = ", ") -> str:
    """'3/3' or '1/3, 2 diverged': how many of the runs finished, and what became of the others."""
    counts = ((row.diverged, "diverged"), (row.interrupted, "interrupted"), (row.collapsed, "collapsed"))
    return separator.join([f"{row.finished}/{row.runs}", *(f"{n} {word}" for n, word in counts if n)])


def _row(entry: Mapping[str, Any], *, is_baseline: bool) -> Row:
    estimate = entry.get("val_loss") or {}
    paired = entry.get("difference") or {}
    high, mean = estimate.get("ci_high"), estimate.get("mean")
    trains, reached = rates_that_train(entry), entry.get("to_baseline") or {}
    never = "share" in reached and reached["share"] is None
    return Row(
        scheme=entry["scheme"],
        parameters=entry.get("parameters"),
        lr=entry.get("lr"),
        lr_at_edge=bool(entry.get("lr_at_edge")),
        lr_low=trains.low if trains else None,
        lr_high=trains.high if trains else None,
        lr_open_low=trains.open_low if trains else None,
        lr_open_high=trains.open_high if trains else None,
        runs=len(entry["runs"]),
        finished=estimate.get("n") or 0,
        diverged=entry.get("diverged") or 0,
        interrupted=entry.get("interrupted") or 0,
        collapsed=entry.get("collapsed") or 0,
        val_loss=mean,
        sd=estimate.get("sd"),
        half_width=None if high is None or mean is None else high - mean,
        perplexity=entry.get("perplexity"),
        bits_per_byte=entry.get("bits_per_byte"),
        difference=paired.get("mean"),
        difference_low=paired.get("ci_low"),
        difference_high=paired.get("ci_high"),
        pairs=paired.get("n"),
        p_value=paired.get("p_value"),
        p_holm=paired.get("p_holm"),
        call="baseline" if is_baseline else call(paired),
        to_baseline=math.inf if never else reached.get("share"),
        steps_to_baseline=reached.get("steps"),
        tokens_to_baseline=reached.get("tokens"),
        flops_to_baseline=reached.get("flops"),
        flops_share_to_baseline=reached.get("flops_share"),
    )
