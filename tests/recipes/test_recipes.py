"""Recipes: that they are the runs they claim to be, and that the command line runs the same."""

from __future__ import annotations

import inspect
import re
import sys
from functools import partial

import pytest
import tyro

from spheret.cli.train import TrainCommand
from spheret.comparison.runs import CompareConfig
from spheret.connections import canonical_name, parse_scheme
from spheret.costs.cost import count_parameters
from spheret.data import expected_vocab_size
from spheret.recipes import RECIPES, list_recipes, recipe
from spheret.recipes.angpt import LADDER

PAPER = [name for name in list_recipes() if name.startswith("gpt2-")]


@pytest.mark.parametrize("name", list_recipes())
def test_every_scheme_of_a_recipe_can_be_trained(name: str) -> None:
    own = recipe(name)
    assert own.scheme in map(canonical_name, own.schemes)
    for scheme in own.schemes:
        config = recipe(name, scheme=scheme).train_config()
        assert canonical_name(config.model.scheme) == canonical_name(scheme)
        assert config.batch_size % config.grad_accum == 0
        assert config.total_warmup_steps < config.total_steps
    assert recipe(name, scheme="spheret:p=3").train_config().model.scheme == "spheret:p=3"  # any other, too


@pytest.mark.parametrize("name", list_recipes())
def test_the_flags_of_a_recipe_give_its_run(name: str) -> None:
    for scheme in (None, recipe(name).schemes[-1]):
        planned = recipe(name, scheme=scheme)
        command = tyro.cli(TrainCommand, args=planned.flags())
        vocab = expected_vocab_size(planned.settings.tokenizer)
        assert command.config(vocab) == planned.train_config()


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_says_where_its_numbers_come_from(name: str) -> None:
    function = RECIPES[name]
    function = function.func if isinstance(function, partial) else function
    text = f"{inspect.getdoc(function)} {inspect.getdoc(sys.modules[function.__module__])}".lower()
    assert re.search(r"\b(read|second hand|guessed|ours)\b", text)
    if name != "cpu-demo":
        assert "guessed" in text and "read" in text


def test_the_demo_is_what_compare_runs() -> None:
    compare, demo = CompareConfig(), recipe("cpu-demo")
    assert demo.schemes == compare.schemes
    for scheme in compare.schemes:
        ran = compare.train_config(scheme, lr=compare.rates(scheme)[1], seed=1, vocab_size=257)
        planned = recipe("cpu-demo", scheme=scheme).train_config()
        assert {**vars(ran), "device": "cpu"} == vars(planned)


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_runs_have_its_tokens(name: str) -> None:
    config = recipe(name).train_config()
    assert config.total_steps * config.tokens_per_step == 6_553_600_000
    assert config.model.n_layer in (12, 24, 36) and f"{config.model.n_layer}l" in name
    assert config.data.data == ("fineweb-edu" if "fineweb" in name else "openwebtext",)
    assert config.model.vocab_size == 50304 and config.model.block_size == 1024
    assert set(recipe(name).schemes) == {"pre-ln", "post-ln", "pre-dyt", "peri-ln", "keel", "geonorm", "proj", "cay"}


@pytest.mark.parametrize(("name", "millions"), [("small-12l", 124), ("medium-24l", 354), ("large-36l", 773)])
def test_gpt2_sizes_by_hand(name: str, millions: int) -> None:
    model = recipe(f"gpt2-{name}", scheme="pre-ln").train_config().model
    layers, d = model.n_layer, model.n_embd
    expected = layers * (12 * d * d + 2 * d) + d + (50304 + 1024) * d  # matrices, gains, final gain, embeddings
    assert count_parameters(model) == expected
    assert expected // 10**6 == millions


@pytest.mark.parametrize("size", LADDER)
def test_the_ladder_has_the_sizes_in_its_names(size: str) -> None:
    nominal = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    assert LADDER[size][0] == nominal
    config = recipe(f"angpt-{size}").train_config()
    assert count_parameters(config.model) == pytest.approx(nominal, rel=0.08)
    assert config.total_steps * config.tokens_per_step == pytest.approx(20 * nominal, rel=1e-3)
    assert config.weight_decay == 0 and config.total_warmup_steps == 0  # the scheme's own


def test_learning_rates_of_ngpt() -> None:
    assert recipe("ngpt-0.5b").train_config().lr == 15e-4
    other = recipe("ngpt-0.5b", scheme="gpt-qknorm").train_config()
    assert other.lr == pytest.approx(0.8 / 1024 * parse_scheme("gpt-qknorm").training(24).lr_factor, rel=0.02)
    assert other.weight_decay == 0.1 and other.total_warmup_steps > 0


def test_unknown_names_are_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"recipe = 'gpt3' is not known: choose one of cpu-demo, gpt2-small-12l"):
        recipe("gpt3")
    with pytest.raises(ValueError, match="unknown scheme 'nope'"):
        recipe("cpu-demo", scheme="nope").train_config()


@pytest.mark.parametrize(("tokenizer", "size"), [("bytes", 257), ("bpe", 4096), ("bpe:300", 300), ("gpt2", 50257)])
def test_vocabularies_are_known_in_advance(tokenizer: str, size: int) -> None:
    assert expected_vocab_size(tokenizer) == size
