from __future__ import annotations

import base64
import csv
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from spheret.reporting import all_plots, load_comparison, load_results, save_plots, write_report
from spheret.reporting.report import render_html
from spheret.reporting.style import BASELINE_COLOR, looks

HOSTILE = "<script>alert(1)</script>$\\frac{$\"'&"


class Page(HTMLParser):
    """Collects what a report contains."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_report_and_csv_are_written_and_nothing_else(make_comparison) -> None:  # type: ignore[no-untyped-def]
    folder = make_comparison()
    path = write_report(folder)
    assert path == folder / "report.html"
    assert sorted(p.name for p in folder.iterdir()) == ["report.html", "results.csv", "results.json", "runs"]
    with (folder / "results.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 6


def test_report_tells_the_verdict_before_the_table(make_comparison) -> None:  # type: ignore[no-untyped-def]
    folder = make_comparison()
    text = page(write_report(folder)).text
    headline = load_results(folder)["verdict"].splitlines()[0]
    assert 0 < text.index(headline) < text.index("bits/byte") < text.index("How to read this")
    assert "5f0c2e7b9d3a41c8" in text and "2.13.0" in text and "spheret compare --schemes pre-ln" in text
    assert "loss is nan at step 700" in text and "2026-08-14 09:26 UTC" in text


def test_report_needs_nothing_from_outside(make_comparison) -> None:  # type: ignore[no-untyped-def]
    report = page(write_report(make_comparison()))
    assert not report.all("script") and not report.all("link") and not report.all("iframe")
    assert all(str(image["src"]).startswith("data:image/svg+xml;base64,") for image in report.all("img"))
    for image in report.all("img"):
        svg = base64.b64decode(str(image["src"]).split(",")[1]).decode()
        assert not re.search(r'(href|src)="(?!#)', svg)
    assert all(str(link["href"]).startswith("./runs/") for link in report.all("a"))


def test_links_lead_to_the_run_folders(make_comparison) -> None:  # type: ignore[no-untyped-def]
    folder = make_comparison()
    hrefs = [str(link["href"]) for link in page(write_report(folder)).all("a")]
    seeds = [href for href in hrefs if "seed" in href]
    assert len(seeds) == 18 and all((folder / href).is_dir() for href in seeds)


def test_report_is_accessible(make_comparison) -> None:  # type: ignore[no-untyped-def]
    report = page(write_report(make_comparison()))
    assert report.all("html")[0]["lang"] == "en"
    assert all(image["alt"] for image in report.all("img"))
    assert all(header.get("scope") in ("row", "col") for header in report.all("th"))
    assert "viewport" in [meta.get("name") for meta in report.all("meta")]


def test_hostile_names_are_shown_and_never_run(make_comparison, kind) -> None:  # type: ignore[no-untyped-def]
    folder = make_comparison([kind(HOSTILE, 1.4), kind(HOSTILE + "2", 1.41)], command=HOSTILE, created=HOSTILE)
    results = load_results(folder)
    results["schemes"][0]["runs"][0]["reason"] = HOSTILE
    results["settings"][HOSTILE] = HOSTILE
    (folder / "results.json").write_text(json.dumps(results))
    report = page(write_report(folder))
    assert not report.all("script")
    assert report.text.count(HOSTILE) >= 6


def test_a_link_cannot_leave_for_another_place(make_comparison) -> None:  # type: ignore[no-untyped-def]
    results = load_results(make_comparison())
    results["schemes"][0]["runs"][0]["run"] = "javascript:alert(1)"
    results["schemes"][0]["runs"][1]["run"] = "//elsewhere.example/x"
    hrefs = [str(link["href"]) for link in Page(render_html(results, [])).all("a")]
    assert hrefs[:2] == ["./javascript%3Aalert%281%29/", "./elsewhere.example/x/"]


def test_figures_are_valid_svg_with_real_text(make_comparison) -> None:  # type: ignore[no-untyped-def]
    plots = {plot.key: plot for plot in all_plots(load_comparison(make_comparison()))}
    assert list(plots)[:4] == ["learning_rates", "differences", "final_loss", "loss_curves"]
    assert {"hidden_norm", "angle_deg", "token_cosine", "skip_gain", "update_ratio"} < set(plots)
    for plot in plots.values():
        words = " ".join(ElementTree.fromstring(plot.svg).itertext())
        assert "spheret:p=1" in words
    assert plots["final_loss"].png(dpi=50).startswith(b"\x89PNG")


def test_figures_repeat_byte_for_byte(make_comparison) -> None:  # type: ignore[no-untyped-def]
    comparison = load_comparison(make_comparison())
    assert [p.svg for p in all_plots(comparison)] == [p.svg for p in all_plots(comparison)]


def test_figures_leave_global_state_alone(make_comparison) -> None:  # type: ignore[no-untyped-def]
    code = (
        "import sys, matplotlib; from pathlib import Path; from spheret.reporting import write_report\n"
        "settings = lambda: {k: matplotlib.rcParams[k] for k in matplotlib.rcParams if k != 'backend'}\n"
        "before = settings(); write_report(Path(sys.argv[1]))\n"
        "assert settings() == before\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(make_comparison())], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_saved_figures(make_comparison, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    write_report(make_comparison(), figures=tmp_path / "figures")
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"loss_curves.svg", "loss_curves.png", "angle_deg.svg"} < names and len(names) == 18


def test_every_scheme_has_its_own_look() -> None:
    styles = looks([f"scheme{i}" for i in range(15)])
    assert len(set(styles.values())) == 15
    assert styles["scheme0"].color == BASELINE_COLOR
    assert looks(["scheme0", "scheme1"])["scheme1"] == styles["scheme1"]


def test_one_seed_reports_without_a_verdict(make_comparison) -> None:  # type: ignore[no-untyped-def]
    text = page(write_report(make_comparison(seeds=(1,)))).text
    assert "No verdict: with one seed" in text and "None" not in text


def test_schemes_without_a_finished_run_are_reported(make_comparison, kind) -> None:  # type: ignore[no-untyped-def]
    kinds = [kind("pre-ln", 1.4), kind("keel", 1.5, diverged=(1, 2, 3)), kind("cay", 1.4, interrupted=(1, 2, 3))]
    report = page(write_report(make_comparison(kinds)))
    assert "0/3, 3 diverged" in report.text and "0/3, 3 interrupted" in report.text
    assert report.all("img") and "None" not in report.text


def test_nothing_finished_at_all_is_still_a_report(make_comparison, kind) -> None:  # type: ignore[no-untyped-def]
    report = page(
        write_report(make_comparison([kind("a", 1.4, diverged=(1, 2)), kind("b", 1.4, diverged=(1, 2))], (1, 2)))
    )
    assert "No verdict: no run of the baseline a finished" in report.text


def test_runs_that_were_never_evaluated_are_no_obstacle(make_comparison) -> None:  # type: ignore[no-untyped-def]
    folder = make_comparison()
    for run in (folder / "runs").iterdir():
        (run / "metrics.jsonl").write_text('{"step": 1, "tokens": 10, "loss": NaN}\n{"st')
        (run / "diagnostics.json").unlink(missing_ok=True)
    assert len(page(write_report(folder)).all("img")) == 3


def test_a_missing_run_is_named_in_a_partial_report(make_comparison) -> None:  # type: ignore[no-untyped-def]
    folder = make_comparison()
    shutil.rmtree(folder / "runs/0-seed1")
    with pytest.raises(FileNotFoundError, match="runs/0-seed1"):
        write_report(folder)
    assert not (folder / "report.html").exists()
    assert (
        "could not be read, so the figures do not include them: runs/0-seed1."
        in page(write_report(folder, partial=True)).text
    )


def test_results_without_a_verdict_get_one(make_comparison) -> None:  # type: ignore[no-untyped-def]
    folder = make_comparison(verdict=None)
    assert "Compared with pre-ln, better: spheret:p=1" in page(write_report(folder)).text


def test_a_run_gone_wild_leaves_the_others_readable(make_comparison, kind) -> None:  # type: ignore[no-untyped-def]
    from spheret.reporting.curves import _loss_limits

    good = [[(float(x), 3.0 + 2.5 / (1 + x)) for x in range(20)] for _ in range(5)]
    wild = [(float(x), 3.0 + 2.5 / (1 + x) if x < 15 else 400.0) for x in range(20)]
    low, high = _loss_limits([*good, wild])
    assert 2.8 < low < 3.2 and high < 6


def test_failed_write_leaves_the_old_report(make_comparison, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    folder = make_comparison()
    (folder / "report.html").write_text("old")
    (folder / "results.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        write_report(folder)
    assert (folder / "report.html").read_text() == "old"


def test_save_plots_of_nothing_makes_the_folder(tmp_path: Path) -> None:
    assert save_plots([], tmp_path / "new") == [] and (tmp_path / "new").is_dir()


@pytest.mark.parametrize("library", ["matplotlib", "jinja2"])
def test_missing_library_names_the_extra(make_comparison, monkeypatch: pytest.MonkeyPatch, library: str) -> None:  # type: ignore[no-untyped-def]
    folder = make_comparison()
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=r'pip install "spheret\[report\]"'):
        write_report(folder)


def test_figures_and_table_treat_collapsed_runs_alike(make_comparison, kind) -> None:  # type: ignore[no-untyped-def]
    """They finished, so they are in every mean, and no cross says that they are not."""
    kinds = [kind("pre-ln", 1.42), kind("post-ln", 1.43, collapsed=(2,)), kind("cay", 1.40, diverged=(3,))]
    comparison = load_comparison(make_comparison(kinds))
    (plot,) = [plot for plot in all_plots(comparison) if plot.key == "loss_curves"]
    styles = looks([entry["scheme"] for entry in comparison.results["schemes"]])
    lines = plot.figure.axes[0].lines
    crossed = {line.get_color() for line in lines if line.get_marker() == "x"}
    assert crossed == {styles["cay"].color}
    for entry in comparison.results["schemes"]:
        (mean,) = [
            line.get_ydata()[-1]
            for line in lines
            if line.get_color() == styles[entry["scheme"]].color
            and line.get_linewidth() > 1
            and len(line.get_xdata()) > 1
        ]
        assert mean == pytest.approx(entry["val_loss"]["mean"])
    assert "collapsed did finish" in plot.caption and "diverged or were interrupted" in plot.caption


def test_a_diverged_run_shows_its_last_finite_loss_and_qualifies_the_claim(make_comparison) -> None:  # type: ignore[no-untyped-def]
    folder = make_comparison()
    results = load_results(folder)
    diverged = results["schemes"][3]["runs"][2]
    assert diverged["outcome"] == "diverged"
    diverged |= {"last_loss": 2.31449, "last_loss_step": 700}
    text = Page(render_html(results, [])).text
    assert "loss is nan at step 700; last finite training loss 2.3145 at step 700" in text
    assert "(1 of 3 runs diverged)" in text.partition("How to read this")[0].partition("bits/byte")[2]


class Parts(HTMLParser):
    """The words of a page that a browser may break at a hyphen: those outside of spans that do not wrap."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.whole, self.breakable, self._depth = [], [], 0  # type: ignore[var-annotated]
        self.feed(text.partition("</style>")[2])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._depth += tag == "span" and ("class", "w") in attrs

    def handle_endtag(self, tag: str) -> None:
        self._depth = 0 if tag == "span" else self._depth

    def handle_data(self, data: str) -> None:
        (self.whole if self._depth else self.breakable).extend(re.findall(r"[^\s:,/]*-[a-z][^\s:,/]*", data))


def test_no_flag_and_no_name_parts_at_its_hyphen(make_comparison, kind) -> None:  # type: ignore[no-untyped-def]
    long = "spheret:p=0.5,alpha=0.3,decay=inv-sqrt,update-norm=rms,final-norm=none"
    folder = make_comparison([kind("pre-ln", 1.4), kind(long, 1.4), kind("spheret:p=learn-per-layer", 1.4)])
    results = load_results(folder)
    results["settings"]["note"] = "as pre-ln"
    results["verdict"] += f"\nNote: Widen it with `--lrs 0.1`, and more `--seeds` for {long}."
    html = render_html(results, all_plots(load_comparison(folder)))
    assert ".w { white-space: nowrap; }" in html
    parts = Parts(html)
    assert not {word for word in parts.breakable if re.search("pre-ln|norm|--|sqrt|learn", word)}
    assert {"pre-ln", "--seeds", "--lrs", "--schemes", "update-norm=rms", "p=learn-per-layer"} <= set(parts.whole)
    assert long in Page(html).text, "no character is lost"


def test_settings_that_schemes_set_for_themselves_are_shown_for_each(make_comparison) -> None:  # type: ignore[no-untyped-def]
    results = load_results(make_comparison())
    results["settings"] |= {"weight_decay": 0.1, "warmup_steps": 200}
    for entry in results["schemes"]:
        own = entry["scheme"] == "ngpt"
        entry |= {"weight_decay": 0.0 if own else 0.1, "warmup_steps": 200, "rates": [0.006] if own else [0.001]}
    text = Page(render_html(results, [])).text.partition("Setup")[2]
    others = "(pre-ln, spheret:p=1, spheret:p=0.5,alpha=1, geonorm, post-ln)"
    assert f"weight_decay0.1 {others}; 0 (ngpt)" in text and f"lrs0.001 {others}; 0.006 (ngpt)" in text
    assert re.search(r"warmup_steps200\s", text)


def test_intervals_do_not_part(make_comparison) -> None:  # type: ignore[no-untyped-def]
    html = render_html(load_results(make_comparison()), [])
    assert re.search(r"nats/token \[\S+,\N{NO-BREAK SPACE}\S+\]", html)


# A notebook's backend, which may not be installed, and settings of size, lines and fonts; and what cannot even be read.
SURROUNDINGS = {
    "plain": ("", ""),
    "theirs": (
        "module://not_there",
        "text.usetex: True\nfigure.dpi: 31\nsavefig.bbox: tight\naxes.grid: False\n"
        "font.family: cursive\naxes.formatter.use_mathtext: True\npath.sketch: 1, 2, 3",
    ),
    "nonsense": ("nonsense", ""),
}


def test_the_users_matplotlib_does_not_reach_the_report(
    make_comparison, kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    code = (
        "import os, sys; from pathlib import Path; from spheret.reporting import write_report\n"
        "write_report(Path(sys.argv[1]), figures=Path(sys.argv[2]))\n"
        "assert os.environ.get('MPLBACKEND') == (sys.argv[3] or None), 'the caller may want it'"
    )
    folder, rc = make_comparison([kind("pre-ln", 1.42), kind("cay", 1.40, diverged=(3,))]), tmp_path / "matplotlibrc"
    monkeypatch.setenv("MATPLOTLIBRC", str(rc))
    for figures, (backend, settings) in SURROUNDINGS.items():
        rc.write_text(settings)
        monkeypatch.setenv("MPLBACKEND", backend)
        if not backend:
            monkeypatch.delenv("MPLBACKEND")
        words = [sys.executable, "-c", code, str(folder), str(tmp_path / figures), backend]
        done = subprocess.run(words, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    for path in (tmp_path / "plain").iterdir():
        assert path.read_bytes() == (tmp_path / "theirs" / path.name).read_bytes(), path.name
        assert path.read_bytes() == (tmp_path / "nonsense" / path.name).read_bytes(), path.name


def test_the_csv_is_written_even_if_the_figures_fail(make_comparison, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    def fail(*args: object) -> None:
        raise RuntimeError("no figures today")

    monkeypatch.setattr("spheret.reporting.report.all_plots", fail)
    folder = make_comparison()
    with pytest.raises(RuntimeError, match="no figures today"):
        write_report(folder)
    assert (folder / "results.csv").exists()
