"""What becomes of a record: the table, and the gate that finds regressions."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from spheret.benchmarking.results import TABLE_HEADER, compare_results, to_table

COMMITTED = sorted((Path(__file__).resolve().parents[2] / "benchmarks" / "results").glob("*/*x*.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_results_can_be_compared_with(path: Path) -> None:
    committed = json.loads(path.read_text())
    assert compare_results(committed, committed) == []
    assert len(to_table(committed)) == len(committed["variants"])


def test_table_has_a_row_per_variant(result: dict[str, Any]) -> None:
    rows = to_table(result)
    assert [row[0] for row in rows] == [v["variant"] for v in result["variants"]]
    assert all(len(row) == len(TABLE_HEADER) for row in rows)
    assert rows[0][TABLE_HEADER.index("ratio")] == "1.000" and rows[0][-1] == "-"


def made_up(result: dict[str, Any], **ratios: float) -> dict[str, Any]:
    changed = copy.deepcopy(result)
    for v in changed["variants"]:
        v["ratio"] = ratios.get(v["variant"], 1.0)
    return changed


def test_gate_finds_a_regression_and_nothing_else(result: dict[str, Any]) -> None:
    old = made_up(result, proj=1.2)
    assert compare_results(old, old) == []
    assert compare_results(old, made_up(result, proj=1.3)) == []  # within 15%
    assert compare_results(made_up(result, proj=1.5), old) == []  # faster
    (found,) = compare_results(old, made_up(result, proj=1.5))
    assert (found.variant, found.old_ratio, found.new_ratio) == ("proj", 1.2, 1.5)
    assert "proj" in str(found) and "+25%" in str(found)
    assert len(compare_results(old, made_up(result, proj=1.3), tolerance=0.05)) == 1


def test_gate_takes_a_switch_that_an_older_result_does_not_know_as_off(result: dict[str, Any]) -> None:
    def newer(value: bool) -> dict[str, Any]:
        return result | {"settings": result["settings"] | {"cold": value}}

    assert compare_results(result, newer(False)) == []
    with pytest.raises(ValueError, match="cold None and True"):
        compare_results(result, newer(True))


def test_gate_refuses_what_cannot_be_compared(result: dict[str, Any]) -> None:
    other = copy.deepcopy(result)
    other["settings"]["n_embd"] = 768
    with pytest.raises(ValueError, match="n_embd 16 and 768"):
        compare_results(result, other)
    fewer = copy.deepcopy(result)
    fewer["variants"] = [v for v in fewer["variants"] if v["variant"] != "proj"]
    with pytest.raises(ValueError, match="lacks proj"):
        compare_results(result, fewer)
    assert compare_results(fewer, result) == []
    longer = copy.deepcopy(result)
    longer["settings"]["rounds"] = 99
    assert compare_results(result, longer) == []
