"""A mistake costs one line, names the value and the fix, and nothing is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

BAD = [
    ("--lrs 1e-3 1e-3", "--lrs (0.001, 0.001)", "name it once"),
    ("--lrs -1", "-1.0", "for example 3e-3"),
    ("--schemes foo", "'foo'", "choose one of pre-ln, post-ln"),
    ("--schemes pre-ln spheret:q=2", "'q=2'", "takes p"),
    ("--schemes proj spheret:p=1", "scheme proj is given twice", "name it once"),
    ("--schemes spheret:p=learn,p-start=-1", "-1.0", "start inside"),
    ("--n-embd 30 --n-head 4", "--n-embd 30", "multiple of --n-head 4"),
    ("--steps 0", "--steps 0", "use 1 or more"),
    ("--seeds 0", "--seeds 0", "at least 1"),
    ("--sweep p", "--sweep 'p'", "for example p=0.1,1,inf"),
    ("--sweep p=1,proj", "'proj'", "it takes a number"),
    ("--data missing.txt", "'missing.txt'", "check the path"),
    ("--tokenizer nope", "'nope'", "'bpe'"),
    ("--val-fraction 2", "--val-fraction 2.0", "for example 0.1"),
    ("--block-size 100000", "100000", "longer text"),
    ("--device cuda:77", "device", "use"),
    ("--out file", "file", "choose another --out"),
    ("--jobs -1", "--jobs -1", "give 0"),
    ("--warmup-steps 2 --warmup-ratio 0.5", "--warmup-steps 2 and --warmup-ratio 0.5", "give one of them"),
]


@pytest.mark.parametrize(("flags", "value", "fix"), BAD)
def test_compare(flags: str, value: str, fix: str, spheret: Any, tiny: list[str]) -> None:
    Path("file").touch()
    code, _, err = spheret("compare --steps 3", *tiny, *flags.split())
    assert code == 2
    assert len(err.splitlines()) == 1 and err.startswith("spheret compare: "), err
    assert value in err and fix in err
    assert not list(Path.cwd().rglob("metrics.jsonl"))


@pytest.mark.parametrize(
    ("command", "value"),
    [
        ("train --steps 0", "--steps 0"),
        ("train --scheme foo", "'foo'"),
        ("train --resume --out nowhere", "no run in nowhere"),
        # The corpus, which may take hours to read, comes last.
        ("train --data missing.txt --device cuda:77", "cuda:77"),
        ("train --data missing.txt --scheme proj:gain=-1", "gain = -1"),
        ("prepare --tokenizer nope", "'nope'"),
        ("prepare --data missing.txt", "'missing.txt'"),
        ("report nowhere", "no results.json and no config.json in nowhere"),
        ("schemes foo", "'foo'"),
    ],
)
def test_other_commands(command: str, value: str, spheret: Any) -> None:
    code, _, err = spheret(command)
    assert code == 2 and len(err.splitlines()) == 1 and value in err, err


def test_a_flag_that_does_not_exist_is_answered_with_one_that_does(spheret: Any) -> None:
    code, out, err = spheret("compare --stepz 3")
    assert code == 2 and "--steps" in out + err


def test_two_comparisons_in_one_folder(spheret: Any, tiny: list[str]) -> None:
    Path("busy").mkdir()
    with FileLock("busy/.lock"):
        code, _, err = spheret("compare --steps 3 --out busy", *tiny)
    assert code == 2 and "another comparison is running in busy" in err


@pytest.mark.parametrize("command", ["train --data missing.txt", "compare --data missing.txt"])
def test_several_ranks_are_refused_before_the_corpus_is_read(
    command: str, spheret: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, _, err = spheret(command)
    assert code == 2 and len(err.splitlines()) == 1 and "WORLD_SIZE is 4" in err and "torchrun" in err


def test_two_training_runs_in_one_folder(spheret: Any, tiny: list[str]) -> None:
    Path("busy").mkdir()
    with FileLock("busy/.train.lock"):
        code, _, err = spheret("train --steps 3 --out busy", *tiny)
    assert code == 2 and len(err.splitlines()) == 1 and "another process is training into busy" in err


def test_a_bug_keeps_its_traceback(spheret: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPHERET_DEBUG", "1")
    with pytest.raises(ValueError, match="unknown scheme 'foo'"):
        spheret("schemes foo")


@pytest.mark.parametrize("seed", ["18446744073709551616", "-1"])
def test_a_seed_out_of_range(seed: str, spheret: Any, tiny: list[str]) -> None:
    code, _, err = spheret(f"train --scheme proj --steps 2 --seed={seed}", *tiny)
    assert code == 2 and f"--seed {seed} is out of range; use 0 to 18446744073709551615" in err
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("flags", [["--out", ""], ["--out="], ["--data", ""], ["--init-from", ""]])
def test_an_empty_path_is_not_the_current_folder(flags: list[str], spheret: Any, tiny: list[str]) -> None:
    code, _, err = spheret("train --scheme proj --steps 2", *tiny, *flags)
    assert code == 2 and f"{flags[0].rstrip('=')} is empty: give it a value, or omit it" in err
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("form", ["--out=~/x", "--out ~/x"])
def test_a_tilde_is_the_home_folder(
    form: str, spheret: Any, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    code, _, err = spheret("train --scheme proj --steps 2", *tiny, *form.split())
    assert code == 0, err
    assert (home / "x" / "run.json").exists() and not Path("~").exists()
