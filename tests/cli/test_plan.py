"""`spheret plan`, and `spheret train --recipe`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tyro

from spheret.cli.main import with_recipe
from spheret.cli.plan import PlanCommand, gpu_table, hours, scientific, short, size
from spheret.costs.cost import GPU, run_cost
from spheret.recipes import list_recipes, recipe


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def test_list_has_one_line_for_each_recipe(spheret: Any) -> None:
    code, out, err = spheret("plan")
    lines = out.splitlines()
    assert code == 0 and not err and max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines[1 : 1 + len(list_recipes())]] == list_recipes()
    assert lines[2].split()[1:5] == ["12", "x", "768", "6.55B"]


def test_a_plan_at_100_columns(spheret: Any) -> None:
    code, out, err = spheret("plan cpu-demo --schemes pre-ln proj --gpu h100 B200 --mfu 0.5")
    assert code == 0 and not err
    assert max(map(len, out.splitlines())) <= 100
    cost = run_cost(recipe("cpu-demo", scheme="pre-ln").train_config())
    assert "102,400 tokens = 200 steps of 8 x 64" in out
    assert re.search(
        rf"pre-ln +{cost.parameters:,} +{scientific(cost.flops_per_token)} +{scientific(cost.flops)} ", out
    )
    assert re.search(rf"pre-ln +{size(cost.memory.activations)} +{size(cost.memory.peak)} ", out)
    assert re.search(r"H100 +80 GB +67 +proj", out) and re.search(r"B200 +180 GB +75 +pre-ln", out)
    assert "50% of its peak" in out and "A100" not in out
    assert "All numbers are ours" in out
    assert out.splitlines()[-1].strip() == "spheret train --recipe cpu-demo --scheme pre-ln --out runs/cpu-demo"


def test_all_methods_of_a_recipe() -> None:
    command = tyro.cli(PlanCommand, args=["gpt2-small-12l", "--schemes", "all"])
    assert tuple(r.scheme for r in command.recipes()) == recipe("gpt2-small-12l").schemes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("nothing", "RECIPE 'nothing' is not known: choose one of cpu-demo"),
        ("cpu-demo --scheme proh", "unknown scheme 'proh'"),
        ("cpu-demo --gpu V100", "--gpu 'V100' is not known: choose one of A100-80GB"),
        ("cpu-demo --mfu 40", "--mfu 40.0: the share"),
    ],
)
def test_errors_are_one_line(spheret: Any, flags: str, message: str) -> None:
    code, _, err = spheret(f"plan {flags}")
    assert code == 2 and message.replace("RECIPE", "recipe =") in err and len(err.splitlines()) == 1


def test_what_does_not_fit_is_said() -> None:
    cost = run_cost(recipe("cpu-demo").train_config())
    table = gpu_table({"proj": cost}, [GPU("small", cost.memory.peak / 1.25, 1e12, 1e12)], 0.4)
    assert list(table.columns[5].cells) == ["too much: 125%"]


def test_train_takes_a_recipe_and_flags_that_win(spheret: Any, corpus: Path) -> None:
    flags = f"--data {corpus} --n_layer=1 --steps 2 --block-size 16 --eval-windows 4"
    code, _, err = spheret(f"train {flags} --recipe cpu-demo --scheme cay --out run")
    assert code == 0 and not err
    config = json.loads(Path("run/config.json").read_text())
    assert config["model"]["n_layer"] == 1 and config["model"]["n_embd"] == 64 and config["steps"] == 2
    assert config["model"]["scheme"] == "cay" and config["device"] == "cpu"


def test_words_of_a_recipe() -> None:
    words = with_recipe(["train", "--recipe=gpt2-large-36l", "--n_embd=64", "--lr", "1e-3", "--data", "a", "b"])
    assert words[-6:] == ["--n_embd=64", "--lr", "1e-3", "--data", "a", "b"]
    joined = " ".join(words)
    assert "--n-layer 36" in joined and "--n-head 20" in joined and "--scheme proj" in joined
    assert joined.count("--lr") == joined.count("--data") == 1 and "1280" not in joined and "openwebtext" not in joined
    assert "--scheme" not in with_recipe(["train", "--recipe", "cpu-demo", "--scheme", "cay"])[:-4]
    for untouched in (["train", "--steps", "3"], ["plan", "cpu-demo", "--mfu", "1"], []):
        assert with_recipe(untouched) == untouched


def test_plan_and_train_take_a_recipe_in_both_forms() -> None:
    assert with_recipe(["plan", "cpu-demo", "--scheme=all"]) == ["plan", "cpu-demo", "--schemes=all"]
    assert with_recipe(["plan", "--gpu", "H100", "--recipe", "cpu-demo"]) == ["plan", "cpu-demo", "--gpu", "H100"]
    flag = with_recipe(["train", "--recipe", "gpt2-large-36l", "--lr", "1"])
    assert with_recipe(["train", "gpt2-large-36l", "--lr", "1"]) == flag and "--n-layer" in flag


def test_warmup_of_the_command_line_replaces_that_of_the_recipe() -> None:
    words = with_recipe(["train", "gpt2-large-36l", "--warmup-ratio", "0.1"])
    assert "--warmup-steps" not in words and words.count("--warmup-ratio") == 1


def test_an_optional_argument_is_not_shown_as_required(spheret: Any) -> None:
    for command, argument in (("plan", "[RECIPE]"), ("schemes", "[SCHEME]")):
        code, out, _ = spheret(f"{command} --help")
        assert code == 0 and f" {argument}" in out.splitlines()[0]


def test_train_names_an_unknown_recipe(spheret: Any) -> None:
    code, _, err = spheret("train --recipe gpt3")
    assert code == 2 and "'gpt3' is not known: choose one of cpu-demo" in err


@pytest.mark.parametrize(
    ("n", "bytes_", "count"), [(1.5e9, "1.50 GB", "1.5B"), (80e9, "80 GB", "80B"), (7680, "7.68 kB", "7.68k")]
)
def test_numbers_for_people(n: float, bytes_: str, count: str) -> None:
    assert (size(n), short(n)) == (bytes_, count)
    assert float(scientific(n)) == n


def test_short_and_long_runs() -> None:
    assert [hours(n) for n in (1234.56, 12.34, 3.912, 0.0301)] == ["1,234.6", "12.3", "3.9", "0.03"]
