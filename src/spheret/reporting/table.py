"""The table of a comparison, for the terminal, GitHub and spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from spheret.comparison.statistics import call

MISSING = "-"
NAME_WIDTH, FOLD_NAMES_ABOVE = 12, 30
"""Least width of the column of scheme names, and the length above which a name is folded after every comma."""
_CALL_STYLE = {"better": "bold green", "worse": "bold red", "unclear": "yellow", "unknown": "dim"}


@dataclass(frozen=True)
class Row:
    """One scheme: losses in nats/token, `half_width` of the 95% interval, `difference` to the first scheme (paired)."""

    scheme: str
    parameters: int | None
    lr: float | None
    lr_at_edge: bool
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


def rows(results: Mapping[str, Any]) -> list[Row]:
    """One row per scheme of results.json, in its order; the first is the baseline."""
    return [_row(entry, is_baseline=i == 0) for i, entry in enumerate(results["schemes"])]


def rich_table(results: Mapping[str, Any], width: int = 100) -> Table:
    """The table for a terminal of `width` columns.

    Columns that do not fit are omitted and named below the table: first bits/byte, then perplexity and the best
    learning rate. Then long scheme names are folded. No name or number is ever cut, so below about 60 columns the
    table is wider than `width`.
    """
    shown = list(rows(results))
    columns = list(_COLUMNS)
    omitted: list[str] = []
    for title in _DROPPED_IN_TURN:
        if _natural_width(_table(shown, columns)) <= width:
            break
        columns.remove(title)
        omitted.append(title)
    table = _table(shown, columns)
    table.width = max(min(width, _natural_width(table)), _least_width(table))
    if omitted:
        table.caption = Text(f"No room for {', '.join(reversed(omitted))}: see results.csv, or widen the terminal.")
        table.caption_justify = "left"
    return table


def print_table(console: Console, results: Mapping[str, Any]) -> None:
    """Print the table at the width of the console."""
    console.print(rich_table(results, console.width), crop=False)


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "scheme": lambda row: row.scheme.replace(",", ",\n") if len(row.scheme) > FOLD_NAMES_ABOVE else row.scheme,
    "best lr": lambda row: lr(row),
    "val loss\n± 95%": lambda row: loss(row, separator="\n"),
    "perplexity": lambda row: perplexity(row.perplexity),
    "bits/byte": lambda row: number(row.bits_per_byte, ".4f"),
    "difference\n[95% interval]": lambda row: difference(row, separator="\n"),
    "runs": lambda row: outcomes(row, separator="\n"),
}
_DROPPED_IN_TURN = ("bits/byte", "perplexity", "best lr")
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
        styles = {"difference\n[95% interval]": _CALL_STYLE.get(row.call, "")}
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
    header = "| scheme | parameters | best lr | val loss | perplexity | bits/byte | difference [CI] | runs |"
    lines = [header, "| --- |" + " ---: |" * (header.count("|") - 2)]
    for row in rows(results):
        cells = [
            f"`{row.scheme}`",
            number(row.parameters, ",d"),
            lr(row),
            loss(row),
            perplexity(row.perplexity),
            number(row.bits_per_byte, ".4f"),
            difference(row),
            outcomes(row),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
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
    return text


def number(value: float | None, spec: str) -> str:
    """`value` in the format `spec`, or a dash if it is unknown."""
    return MISSING if value is None else format(value, spec)


def lr(row: Row) -> str:
    """The learning rate, with an asterisk if it lies at the edge of the grid."""
    return number(row.lr, "g") + ("*" if row.lr_at_edge else "")


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
    return Row(
        scheme=entry["scheme"],
        parameters=entry.get("parameters"),
        lr=entry.get("lr"),
        lr_at_edge=bool(entry.get("lr_at_edge")),
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
    )
