from __future__ import annotations

import csv
import io

import pytest
from rich.console import Console

from spheret.reporting import csv_text, load_results, markdown, rich_table, rows
from spheret.reporting.table import perplexity, rate


def printed(results, width: int = 100) -> str:  # type: ignore[no-untyped-def]
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(rich_table(results))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.fixture
def results(make_comparison):  # type: ignore[no-untyped-def]
    return load_results(make_comparison())


def test_terminal_table_is_whole_at_100_columns(results) -> None:  # type: ignore[no-untyped-def]
    text = printed(results)
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for row in rows(results):
        assert f"{row.val_loss:.4f}" in text and f"± {row.half_width:.4f}" in text
        if row.difference_low is not None:
            assert f"{row.difference:+.4f}" in text
            assert f"[{row.difference_low:+.4f}, {row.difference_high:+.4f}]" in text
    assert "1 diverged" in text and "1 collapsed" in text and "0.008*" in text


def test_brackets_in_a_name_are_not_markup(results) -> None:  # type: ignore[no-untyped-def]
    results["schemes"][1]["scheme"] = "[red]x[/red]"
    assert "[red]x[/red]" in printed(results).replace("\n", "")


def test_rows_hold_the_figures_of_results(results) -> None:  # type: ignore[no-untyped-def]
    baseline, best = rows(results)[:2]
    source = results["schemes"][1]
    assert baseline.call == "baseline" and baseline.difference is None
    assert best.call == "better" and best.p_holm == source["difference"]["p_holm"] >= best.p_value
    assert best.val_loss - best.half_width == pytest.approx(source["val_loss"]["ci_low"])


def test_markdown_is_a_well_formed_table(results) -> None:  # type: ignore[no-untyped-def]
    results["schemes"][1]["scheme"] = "a|b"
    lines = [line for line in markdown(results).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(results["schemes"])
    assert {line.replace("\\|", "").count("|") for line in lines} == {10}
    assert "asterisk" in markdown(results)


def test_csv_gives_full_precision_back(results) -> None:  # type: ignore[no-untyped-def]
    records = list(csv.DictReader(io.StringIO(csv_text(results))))
    assert [r["scheme"] for r in records] == [e["scheme"] for e in results["schemes"]]
    assert float(records[1]["difference"]) == results["schemes"][1]["difference"]["mean"]
    assert records[0]["difference"] == "" and records[3]["diverged"] == "1"


def test_a_scheme_without_finished_runs_has_dashes(make_comparison, kind) -> None:  # type: ignore[no-untyped-def]
    results = load_results(make_comparison([kind("pre-ln", 1.4), kind("keel", 1.5, diverged=(1, 2, 3))]))
    keel = rows(results)[1]
    assert keel.val_loss is None and keel.call == "unknown" and keel.diverged == 3
    line = next(line for line in markdown(results).splitlines() if "keel" in line)
    assert "None" not in line and "nan" not in line and "0/3, 3 diverged" in line


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (812.4, "812"), (18_420, "18.4k"), (1.234e6, "1.23M"), (2.5e9, "2.50G")]
)
def test_rates(value: float | None, text: str) -> None:
    assert rate(value) == text


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (24.912, "24.91"), (20815.3, "20,815")])
def test_perplexities(value: float | None, text: str) -> None:
    assert perplexity(value) == text
