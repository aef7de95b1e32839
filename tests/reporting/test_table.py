from __future__ import annotations

import csv
import io
import itertools
import re

import pytest
from rich.console import Console

from spheret.reporting import csv_text, load_results, markdown, print_table, rows, write_report
from spheret.reporting.table import perplexity


def printed(results, width: int = 100) -> str:  # type: ignore[no-untyped-def]
    console = Console(width=width, file=io.StringIO(), color_system=None)
    print_table(console, results)
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


LONG_NAMES = ("pre-ln", "spheret:p=learn-per-layer", "spheret:p=learn-per-layer,alpha=0.5,update-norm=rms")


@pytest.fixture
def long_names(results):  # type: ignore[no-untyped-def]
    for entry, name in zip(results["schemes"], LONG_NAMES, strict=False):
        entry["scheme"] = name
    return results


@pytest.mark.parametrize("width", [60, 70, 80, 100, 120, 200])
def test_what_does_not_fit_is_left_out_and_named_but_never_cut(long_names, width: int) -> None:  # type: ignore[no-untyped-def]
    text = printed(long_names, width)
    assert max(map(len, text.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for row in rows(long_names):
        assert f"{row.val_loss:.4f}" in text and f"± {row.half_width:.4f}" in text
        if row.difference_low is not None:
            assert f"{row.difference:+.4f}" in text
            assert f"[{row.difference_low:+.4f}, {row.difference_high:+.4f}]" in text
    first_column = "".join(line.split()[0] for line in text.splitlines() if re.match(r" \S", line))
    assert all(name in first_column for name in LONG_NAMES)
    table, _, missing = text.partition("No room for ")
    for title in ("best lr", "perplexity", "bits/byte"):
        assert (title in table) != (title in " ".join(missing.split()))


def test_columns_go_in_the_order_of_what_they_tell(long_names) -> None:  # type: ignore[no-untyped-def]
    shown = [
        {t for t in ("best lr", "perplexity", "bits/byte") if t in printed(long_names, w).partition("No room")[0]}
        for w in range(60, 140, 3)
    ]
    assert shown[0] == set() and len(shown[-1]) == 3
    assert all(less <= more for less, more in itertools.pairwise(shown))
    assert {"best lr"} in shown and {"best lr", "perplexity"} in shown


def test_a_very_narrow_terminal_gets_a_table_that_is_too_wide_rather_than_wrong(long_names) -> None:  # type: ignore[no-untyped-def]
    text = printed(long_names, 30)
    assert all(f"{row.val_loss:.4f}" in text for row in rows(long_names))


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
    assert {line.replace("\\|", "").count("|") for line in lines} == {11}
    assert "asterisk" in markdown(results)


def test_csv_gives_full_precision_back(results) -> None:  # type: ignore[no-untyped-def]
    records = list(csv.DictReader(io.StringIO(csv_text(results))))
    assert [r["scheme"] for r in records] == [e["scheme"] for e in results["schemes"]]
    assert float(records[1]["difference"]) == results["schemes"][1]["difference"]["mean"]
    assert records[0]["difference"] == "" and records[3]["diverged"] == "1"


def test_ranges_and_steps_are_in_every_table(results) -> None:  # type: ignore[no-untyped-def]
    wide, pasted = printed(results, 140), markdown(results)
    records = {r["scheme"]: r for r in csv.DictReader(io.StringIO(csv_text(results)))}
    assert "trains" in wide and "steps to" in wide and "61%" in wide and "never" in wide and ">=0.008" in wide
    assert "| trains from, to |" in pasted and "| 0.002 to >=0.008 |" in pasted and "| 61% |" in pasted
    assert "within 0.05 nats" in pasted and "interpolated between evaluations" in pasted
    best, lost = records["spheret:p=1"], records["ngpt"]
    assert (best["lr_low"], best["lr_high"], best["lr_open_high"]) == ("0.002", "0.008", "True")
    assert float(best["steps_to_baseline"]) == pytest.approx(2000 * float(best["to_baseline"]))
    assert float(lost["to_baseline"]) == float("inf") and lost["steps_to_baseline"] == ""
    assert records["geonorm"]["lr_low"] == "" and records["geonorm"]["lr_open_low"] == "False", "it trains nowhere"
    results["schemes"][1]["to_baseline"]["flops_share"] = 0.9
    assert "61%" in printed(results, 140) and "(90% FLOPs)" in printed(results, 140)
    assert "| 61% (90% FLOPs) |" in markdown(results)


def test_results_of_earlier_releases_have_the_columns_they_had(results) -> None:  # type: ignore[no-untyped-def]
    for entry in results["schemes"]:
        entry["tuning"] = entry["tuning"][:1]
        del entry["to_baseline"], entry["flops_per_token"]
    for text in (printed(results, 140), markdown(results)):
        assert "trains" not in text and "baseline |" not in text.replace("| baseline |", "") and "steps to" not in text
    assert {line.count("|") for line in markdown(results).splitlines() if line.startswith("|")} == {9}


def test_a_scheme_without_finished_runs_has_dashes(make_comparison, kind) -> None:  # type: ignore[no-untyped-def]
    results = load_results(make_comparison([kind("pre-ln", 1.4), kind("keel", 1.5, diverged=(1, 2, 3))]))
    keel = rows(results)[1]
    assert keel.val_loss is None and keel.call == "unknown" and keel.diverged == 3
    line = next(line for line in markdown(results).splitlines() if "keel" in line)
    assert "None" not in line and "nan" not in line and "0/3, 3 diverged" in line


def test_no_table_compares_speeds_that_were_taken_side_by_side(make_comparison) -> None:  # type: ignore[no-untyped-def]
    """Runs share the machine: one run gave schemes of equal cost 28.1k, 38.3k and 13.0k tokens a second."""
    folder = make_comparison()
    results = load_results(folder)
    report = write_report(folder).read_text()
    for text in (printed(results, 200), markdown(results), csv_text(results), report):
        assert "tokens/s" not in text and "18.4k" not in text
    assert not any(key == "tokens_per_s" for entry in results["schemes"] for key in entry)
    assert "spheret bench" in report


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (24.912, "24.91"), (20815.3, "20,815")])
def test_perplexities(value: float | None, text: str) -> None:
    assert perplexity(value) == text
