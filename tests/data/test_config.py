from __future__ import annotations

import json

import pytest

from spheret.data import DataConfig


def test_round_trip_through_json() -> None:
    config = DataConfig(data=("a.txt", "b"), tokenizer="bpe:512", val_fraction=0.2, text_column="body", split_seed=3)
    assert DataConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert hash(config) == hash(DataConfig(**json.loads(json.dumps(config.to_dict()))))


def test_a_lone_string_is_one_corpus() -> None:
    assert DataConfig(data="stdlib").data == ("stdlib",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"data": ()}, "names no corpus"),
        ({"val_fraction": 0.0}, "val_fraction=0.0"),
        ({"val_fraction": 1.0}, "val_fraction=1.0"),
        ({"text_column": ""}, "text_column"),
        ({"tokenizer": "word"}, "'word'.*'bytes'"),
        ({"tokenizer": "bytes:3"}, "'bytes:3'"),
        ({"tokenizer": "gpt2:"}, "'gpt2:'"),
        ({"tokenizer": "bpe:many"}, "'bpe:many'.*bpe:4096"),
        ({"tokenizer": "bpe:257"}, "at least 258"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        DataConfig(**settings)  # type: ignore[arg-type]


def test_unknown_keys_are_named() -> None:
    with pytest.raises(ValueError, match=r"\['colour'\].*val_fraction"):
        DataConfig.from_dict({"data": ["stdlib"], "colour": "red"})
