"""Writes results.csv and report.html into the folder of a comparison, beside its results.json.

report.html stands alone: it has no script, loads nothing from elsewhere, and escapes every value.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from spheret.comparison.statistics import all_pairs as compare_all_pairs
from spheret.comparison.statistics import has_diverged, has_finished, perplexity_change
from spheret.comparison.verdict import unfinished_words, verdict
from spheret.reporting import table
from spheret.reporting.collect import ComparisonFolder, load_comparison, load_run
from spheret.reporting.curves import run_plots
from spheret.reporting.plots import result_plots
from spheret.reporting.side_tables import CALL_WORDS, PairRow, pair_rows, pairs_note
from spheret.reporting.single_run import outcome_lines, run_rows, single_run_plots
from spheret.reporting.style import Plot
from spheret.reporting.sweeps import sweep_plots
from spheret.training.config import config_to_dict
from spheret.training.run_folder import last_finite_loss, read_config, write_bytes, write_text
from spheret.training.settings import flags_of

REPORT_NAME, CSV_NAME, TEMPLATE_NAME = "report.html", "results.csv", "report.html.j2"
# Settings that a scheme may set for itself, and their keys in its entry of results.json.
_OF_SCHEME = {"lrs": "rates"} | {key: key for key in ("warmup_steps", "weight_decay", "qkv_lr", "mlp_out_lr")}


def write_report(folder: Path, *, partial: bool = False, figures: Path | None = None, all_pairs: bool = False) -> Path:
    """Write results.csv and report.html into the folder of a comparison; returns the path of report.html.

    partial: build the report even if run folders are missing. The report names them.
    figures: also save every figure in this folder, as .svg and .png.
    all_pairs: compare every scheme with every other, also if results.json does not.

    Raises FileNotFoundError if results.json or a run folder is missing, ValueError for results of another format, and
    ImportError, naming the extra, if matplotlib or jinja2 is not installed.
    """
    comparison = load_comparison(Path(folder), partial=partial)
    if all_pairs:
        comparison.results["all_pairs"] = compare_all_pairs(comparison.results["schemes"])
    # First, because it needs no library that could fail.
    write_text(comparison.folder / CSV_NAME, table.csv_text(comparison.results))
    plots = all_plots(comparison)
    if figures is not None:
        save_plots(plots, figures)
    report = comparison.folder / REPORT_NAME
    write_text(report, render_html(comparison.results, plots, comparison.missing))
    return report


def write_run_report(folder: Path, *, figures: Path | None = None) -> Path:
    """Write report.html into the folder of one run, finished or not; returns its path.

    figures: also save every figure in this folder, as .svg and .png.

    Raises FileNotFoundError if the folder is not that of a run, ValueError for damaged files, and ImportError, naming
    the extra, if matplotlib or jinja2 is not installed.
    """
    run = load_run(folder)
    plots = single_run_plots(run)
    if figures is not None:
        save_plots(plots, figures)
    config = read_config(folder)
    headline, *points = outcome_lines(run)
    environment = {key: run.outcome.get(key) or {} for key in ("versions", "machine")}
    stored = {"settings": config_to_dict(config), "data": run.outcome.get("data"), "environment": environment}
    context = {
        "title": f"Run of {config.model.scheme}",
        "created": None,
        "headline": headline,
        "points": points,
        "rows": run_rows(run),
        "plots": plots,
        "command": shlex.join(["spheret", "train", *flags_of(config), "--out", str(folder)]),
        "facts": [(name, _facts(stored, name.lower())) for name in ("Settings", "Data", "Environment")],
    }
    report = folder / REPORT_NAME
    write_text(report, _rendered("run.html.j2", context))
    return report


def all_plots(comparison: ComparisonFolder) -> list[Plot]:
    """Every figure that the comparison has data for: loss over a setting, what decides, then what explains."""
    return [*sweep_plots(comparison.results), *result_plots(comparison.results), *run_plots(comparison)]


def save_plots(plots: Sequence[Plot], folder: Path) -> list[Path]:
    """Save figures as <key>.svg and <key>.png, and make the folder if needed; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for plot in plots:
        for suffix, payload in ((".svg", plot.svg), (".png", plot.png())):
            path = folder / f"{plot.key}{suffix}"
            write_bytes(path, payload)
            paths.append(path)
    return paths


def render_html(results: Mapping[str, Any], plots: Sequence[Plot], missing: Sequence[str] = ()) -> str:
    """The HTML of the report, from results.json and its figures; `missing` names run folders that could not be read.

    Raises ImportError, naming the extra, if jinja2 is not installed.
    """
    return _rendered(TEMPLATE_NAME, _context(results, plots, missing))


def _rendered(template: str, context: Mapping[str, Any]) -> str:
    jinja2 = _jinja2()
    # Scheme names and error messages may hold any character, hence autoescape. StrictUndefined makes a name that the
    # template misspells an error and not an empty string.
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("spheret.reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"code": _with_code, "unbroken": _unbroken}
    return str(environment.get_template(template).render(**context))


def _context(results: Mapping[str, Any], plots: Sequence[Plot], missing: Sequence[str]) -> dict[str, Any]:
    headline, *lines = (results.get("verdict") or verdict(results)).splitlines()
    seeds = {run["seed"] for entry in results["schemes"] for run in entry["runs"]}
    return {
        "title": _title(results, len(seeds)),
        "created": results.get("created"),
        "created_words": _date(results.get("created")),
        "command": results.get("command"),
        "headline": headline,
        "points": [line[2:] for line in lines if line.startswith("- ")],
        "notes": [line.removeprefix("Note: ") for line in lines if not line.startswith("- ")],
        "rows": [_cells(row) for row in table.rows(results)],
        "footnote": _at_least(table.footnote(results)),
        "plots": plots,
        "pairs": [_pair_cells(pair) for pair in pair_rows(results)],
        "pairs_note": pairs_note(results),
        "shows_reach": any(map(table.OPTIONAL["steps to\nbaseline"], table.rows(results))),
        "runs": _run_rows(results, "runs"),
        "tuning": _run_rows(results, "tuning"),
        "missing": missing,
        "facts": [(name, _facts(results, name.lower())) for name in ("Settings", "Data", "Environment")],
        "n_seeds": len(seeds),
        "n_comparisons": max(len(results["schemes"]) - 1, 0),
        "tuned": len((results.get("settings") or {}).get("lrs") or []) > 1,
        "tuning_seed": (results.get("settings") or {}).get("tuning_seed"),
        "seeds": sorted(seeds),
    }


def _title(results: Mapping[str, Any], n_seeds: int) -> str:
    schemes = len(results["schemes"])
    name = (results.get("data") or {}).get("name")
    counted = f"{schemes} scheme{'s' * (schemes != 1)}, {n_seeds} seed{'s' * (n_seeds != 1)}"
    return f"Comparison of {counted}" + (f" on {name}" if name else "")


def _cells(row: table.Row) -> dict[str, Any]:
    interval = None
    if row.difference_low is not None and row.difference_high is not None:
        interval = _typeset(f"[{row.difference_low:+.4f}, {row.difference_high:+.4f}]")
    change = None if row.difference is None else _typeset(f"{perplexity_change(row.difference):+.1f}%")
    return {
        "scheme": row.scheme,
        "parameters": table.number(row.parameters, ",d"),
        "lr": table.lr(row),
        "trains": None if row.lr_open_low is None else _typeset(_at_least(table.rate_range(row))),
        "to_baseline": table.to_baseline(row, separator="\n").partition("\n"),
        "loss": table.number(row.val_loss, ".4f"),
        "half_width": table.number(row.half_width, ".4f") if row.half_width is not None else None,
        "perplexity": table.perplexity(row.perplexity),
        "bits_per_byte": table.number(row.bits_per_byte, ".4f"),
        "difference": "" if row.call == "baseline" else _typeset(table.number(row.difference, "+.4f")),
        "interval": interval,
        "change": change,
        "call": row.call,
        "call_words": _call_words(row),
        "outcomes": table.outcomes(row),
        "failed": bool(row.diverged or row.collapsed or row.interrupted),
    }


def _at_least(text: str) -> str:
    return text.replace("<=", "\N{LESS-THAN OR EQUAL TO}").replace(">=", "\N{GREATER-THAN OR EQUAL TO}")


def _pair_cells(pair: PairRow) -> dict[str, str]:
    signed = {"difference": _typeset(pair.difference), "interval": _typeset(pair.interval)}
    return asdict(pair) | signed | {"call_words": CALL_WORDS[pair.call]}


def _call_words(row: table.Row) -> str:
    """'better', for a scheme some of whose runs have no loss 'better (1 of 3 runs diverged)'."""
    words = CALL_WORDS.get(row.call, "baseline")
    lost = unfinished_words(row.runs, row.diverged, row.interrupted)
    return f"{words} ({lost})" if lost else words


def _run_rows(results: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    return [_run_cells(entry, run, kind) for entry in results["schemes"] for run in entry.get(kind) or []]


def _run_cells(entry: Mapping[str, Any], run: Mapping[str, Any], kind: str) -> dict[str, Any]:
    outcome = run.get("outcome") or "unknown"
    if run.get("collapsed"):
        outcome += ", collapsed"
    error = run.get("val_se")
    return {
        "scheme": entry["scheme"],
        "seed": run.get("seed", "tuning"),
        "lr": table.number(run.get("lr", entry.get("lr")), "g"),
        "loss": table.number(run.get("val_loss"), ".4f") + (f" ± {error:.4f}" if error is not None else ""),
        "bits_per_byte": table.number(run.get("val_bpb"), ".4f"),
        "outcome": outcome,
        "bad": not has_finished(run) or bool(run.get("collapsed")),
        "reason": _reason(run),
        "run": run.get("run"),
        "href": _relative_link(run.get("run")),
        "chosen": kind == "tuning" and run.get("lr") == entry.get("lr"),
    }


def _reason(run: Mapping[str, Any]) -> str | None:
    """Why a run ended early; for a diverged run also its last finite loss."""
    reason: str | None = run.get("reason")
    if has_diverged(run) and run.get("last_loss") is not None:
        loss = last_finite_loss(run["last_loss"], run.get("last_loss_step"))
        return f"{reason}; {loss}" if reason else loss
    return reason


def _relative_link(name: Any) -> str | None:
    """A link into the report's own folder, even if the name has a colon or a leading slash."""
    return "./" + quote(str(name).lstrip("/"), safe="/") + "/" if name else None


def _facts(results: Mapping[str, Any], section: str) -> list[tuple[str, str]]:
    facts = {name: _words(value) for name, value in _flat(results.get(section) or {})}
    if section == "settings" and "schemes" in results:
        facts |= {name: text for name, key in _OF_SCHEME.items() if (text := _by_scheme(results, key)) is not None}
    return list(facts.items())


def _by_scheme(results: Mapping[str, Any], key: str) -> str | None:
    """A setting of each scheme's own: '0.1', or '0.1 (pre-ln, proj); 0 (ngpt)'. None if none is recorded."""
    groups: dict[str, list[str]] = {}
    for entry in results["schemes"]:
        if key in entry:
            groups.setdefault(_words(entry[key]), []).append(entry["scheme"])
    if len(groups) < 2:
        return next(iter(groups), None)
    return "; ".join(f"{value} ({', '.join(schemes)})" for value, schemes in groups.items())


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _words(value: Any) -> str:
    if isinstance(value, bool) or value is None:  # first, because a bool is an int too
        return {True: "yes", False: "no", None: table.MISSING}[value]
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return " ".join(_words(item) for item in value)
    return str(value)


def _typeset(text: str) -> str:
    """`text` with minus signs instead of hyphens before numbers, and without line breaks in 'p = 0.01', '[-1, 2]'."""
    signed = re.sub(r"(?<![\w-])-(?=\d)", "\N{MINUS SIGN}", text)
    whole = re.sub(r"(\[\S+,) (?=\S+\])", "\\1\N{NO-BREAK SPACE}", signed)
    return whole.replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}")


def _unbroken(text: str, longest: int = 30) -> Any:
    """`text`, escaped; its lines break between words only, where browsers would also part `--` from `seeds`.

    A word of more than `longest` characters, such as a scheme with options, may also break after a colon, comma or
    slash. What is too long even then breaks anywhere.
    """
    from markupsafe import Markup, escape

    def whole(part: str) -> Any:
        return Markup('<span class="w">{}</span>').format(part) if "-" in part and len(part) <= 30 else escape(part)

    def word(text: str) -> Any:
        parts = re.split(r"(?<=[:,/])(?=.)", text) if len(text) > longest else [text]
        return Markup("<wbr>").join(map(whole, parts))

    return Markup("").join(map(word, re.split(r"(\s+)", str(text))))


def _date(created: Any) -> str | None:
    """A date such as '2026-08-14 09:26 UTC'. A text that is not an ISO time is returned unchanged."""
    try:
        return datetime.fromisoformat(str(created)).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return str(created) if created else None


def _with_code(text: str) -> Any:
    """`text`, escaped: what is between backticks becomes code, and the rest gets proper minus signs."""
    from markupsafe import Markup

    parts = text.split("`")
    if len(parts) % 2 == 0:  # an odd number of backticks, so one has no partner
        return _unbroken(_typeset(text))
    code = Markup("<code>{}</code>")
    return Markup("").join(code.format(_unbroken(p)) if i % 2 else _unbroken(_typeset(p)) for i, p in enumerate(parts))


def _jinja2() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise ImportError('the HTML report needs jinja2: pip install "spheret[report]"') from error
    return jinja2
