"""What a comparison asks for: its runs, their folders, the command that repeats it."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest
import torch

from spheret.comparison.runs import CompareConfig, parse_sweep, seed_runs, tuning_runs

CONFIG = CompareConfig(schemes=("pre-ln", "proj"), lrs=(1e-3, 2e-3), seeds=3, steps=10)


def folder(config: CompareConfig, scheme: str = "proj", lr: float = 1e-3, fingerprint: str = "f") -> str:
    return next(seed_runs(config, scheme, lr, 257, fingerprint)).folder.name


def test_tuning_is_on_a_seed_of_its_own() -> None:
    tuning = list(tuning_runs(CONFIG, "proj", 257, "f"))
    seeds = list(seed_runs(CONFIG, "proj", 2e-3, 257, "f"))
    assert [(t.lr, t.seed) for t in tuning] == [(1e-3, 0), (2e-3, 0)]
    assert [s.seed for s in seeds] == [1, 2, 3] and {s.lr for s in seeds} == {2e-3}
    assert CONFIG.total_runs == 2 * (2 + 3)
    assert len({s.folder for s in (*tuning, *seeds)}) == 5


def test_nothing_to_tune_with_one_rate() -> None:
    single = dataclasses.replace(CONFIG, lrs=(1e-3,))
    assert not list(tuning_runs(single, "proj", 257, "f")) and single.total_runs == 2 * 3


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 11},
        {"n_layer": 7},
        {"batch_size": 9},
        {"schedule": "constant"},
        {"weight_decay": 0.0},
        {"eval_windows": 7},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_what_decides_the_result_decides_the_folder(change: dict[str, object]) -> None:
    assert folder(dataclasses.replace(CONFIG, **change)) != folder(CONFIG)  # type: ignore[arg-type]


def test_the_corpus_the_rate_and_the_options_of_the_scheme_decide_too() -> None:
    names = [
        folder(CONFIG),
        folder(CONFIG, fingerprint="g"),
        folder(CONFIG, lr=1.0000001e-3),
        folder(CONFIG, scheme="proj:alpha=1.0000001"),
        folder(CONFIG, scheme="proj:alpha=1"),
    ]
    assert len(set(names)) == len(names)


def test_automatic_precision_keeps_runs_of_a_gpu_and_of_a_cpu_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = folder(CONFIG)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert folder(CONFIG) != on_cpu
    assert folder(dataclasses.replace(CONFIG, device="cpu")) == on_cpu


def test_what_only_says_where_or_how_often_does_not() -> None:
    same = dataclasses.replace(CONFIG, eval_interval=3, jobs=1, seeds=9, schemes=("proj",), data=("elsewhere",))
    assert folder(same) == folder(CONFIG)


def test_long_names_fit_a_file_system() -> None:
    names = {folder(CONFIG, scheme=f"spheret:{'alpha=0.123456789,' * 20}p={p}") for p in (0.5, 0.6)}
    assert len(names) == 2 and max(map(len, names)) < 150


def test_the_command_repeats_the_comparison() -> None:
    config = dataclasses.replace(
        CONFIG,
        lrs=(1 / 3, 1e-3),
        out=Path("a folder"),
        warmup_steps=5,
        data=("x.txt", "y z"),
        schemes=("cay", "spheret:p=1"),
    )
    words = shlex.split(config.command())
    assert words[:2] == ["spheret", "compare"]
    flags: dict[str, list[str]] = {}
    for word in words[2:]:
        if word.startswith("--"):
            values = flags.setdefault(word, [])
        else:
            values.append(word)
    assert [float(v) for v in flags["--lrs"]] == [1 / 3, 1e-3]
    assert flags["--out"] == ["a folder"] and flags["--data"] == ["x.txt", "y z"] and flags["--warmup-steps"] == ["5"]
    assert flags["--schemes"] == ["cay", "spheret:p=1"] and flags["--seeds"] == ["3"] and "--n-layer" not in flags


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schemes": ()}, "no schemes given"),
        ({"schemes": ("proj", "spheret:p=1")}, "scheme proj is given twice"),
        ({"lrs": (1e-3, 0.001)}, "given twice"),
        ({"lrs": (1e-3, -1.0)}, "must be positive"),
        ({"seeds": 0}, "at least 1 run"),
        ({"jobs": -1}, "give 0"),
        ({"n_head": 3}, "not a multiple"),
        ({"sweep": "p"}, r"write \[SCHEME:\]OPTION=V1,V2"),
        ({"sweep": "proj:=1,2"}, r"write \[SCHEME:\]OPTION=V1,V2"),
        ({"sweep": "p=1,1.0"}, "two different values"),
        ({"sweep": "p=1,,2"}, "p = '' does not fit"),
        ({"sweep": "p=1,-2"}, r"must lie in \(0, inf\]"),
        ({"sweep": "q=1,2"}, "no option 'q=1'; spheret takes p"),
        ({"sweep": "nope:p=1,2"}, "unknown scheme 'nope'"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_at_once(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)  # type: ignore[arg-type]


def test_learning_rates_follow_the_width_where_none_are_given() -> None:
    assert CompareConfig().lrs == (0.0063, 0.013, 0.025, 0.05)
    assert CompareConfig(n_embd=1280, n_head=20).lrs == (0.00031, 0.00063, 0.0013, 0.0025)
    assert CompareConfig(lrs=(1e-3,)).lrs == (1e-3,)


def test_schemes_have_their_own_rates_where_none_are_given() -> None:
    config = CompareConfig(schemes=("proj", "ngpt"), n_embd=100, n_head=2)
    assert config.lrs == config.rates("pre-ln") == (0.004, 0.008, 0.016, 0.032)
    assert config.rates("proj") == (0.008, 0.016, 0.032, 0.064)
    assert config.rates("ngpt") == (0.012, 0.024, 0.048, 0.096)
    assert [spec.lr for spec in tuning_runs(config, "ngpt", 257, "f")] == [0.012, 0.024, 0.048, 0.096]
    assert "--lrs" not in config.command()  # given there, they would be the same for both
    wider = dataclasses.replace(config, n_embd=200)
    assert wider.rates("proj") == (0.004, 0.008, 0.016, 0.032)
    given = dataclasses.replace(config, lrs=(0.002, 0.004, 0.008))
    assert given.rates("ngpt") == given.lrs and "--lrs" in given.command()


def test_decay_and_warmup_of_a_method_decide_the_folder() -> None:
    config = CompareConfig(schemes=("ngpt",), lrs=(1e-3,), steps=10)
    assert folder(config, "ngpt") == folder(dataclasses.replace(config, weight_decay=0.0, warmup_ratio=0.0), "ngpt")
    assert folder(config, "ngpt") != folder(dataclasses.replace(config, weight_decay=0.1), "ngpt")
    assert folder(config, "ngpt") != folder(dataclasses.replace(config, head="tied"), "ngpt")


def test_a_sweep_adds_a_scheme_for_each_value() -> None:
    config = dataclasses.replace(CONFIG, sweep="p=0.5,1,2,inf,2.0")
    assert config.names == ["pre-ln", "proj", "spheret:p=0.5", "cay", "spheret:p=inf"], "p=1 is proj, and stays there"
    assert config.total_runs == 5 * (2 + 3)
    sweep = parse_sweep("p=0.5,1,2,inf,2.0")
    assert (sweep.scheme, sweep.option, sweep.values) == ("spheret", "p", ("0.5", "1", "2", "inf"))
    assert sweep.names == ("spheret:p=0.5", "proj", "cay", "spheret:p=inf")


@pytest.mark.parametrize(
    ("text", "scheme", "option", "names"),
    [
        ("keel:alpha=4,8", "keel", "alpha", ("keel:alpha=4", "keel:alpha=8")),
        ("proj:update-norm=none,rms", "proj", "update-norm", ("proj", "proj:update-norm=rms")),
        (
            "spheret:decay=inv,p=0.1,learn",
            "spheret:decay=inv",
            "p",
            ("spheret:p=0.1,decay=inv", "spheret:p=learn,decay=inv"),
        ),
    ],
)
def test_a_sweep_takes_any_option_of_any_scheme(text: str, scheme: str, option: str, names: tuple[str, ...]) -> None:
    sweep = parse_sweep(text)
    assert (sweep.scheme, sweep.option, sweep.names) == (scheme, option, names)


def test_the_command_holds_the_sweep_and_not_its_schemes() -> None:
    words = shlex.split(dataclasses.replace(CONFIG, sweep="p=0.5,inf", all_pairs=True).command())
    assert words[words.index("--schemes") + 1 :][:2] == ["pre-ln", "proj"] and "spheret:p=0.5" not in words
    assert words[words.index("--sweep") + 1] == "p=0.5,inf"
    assert "--all-pairs" in words and "True" not in words
    assert "--all-pairs" not in CONFIG.command() and "--sweep" not in CONFIG.command()
