"""The benchmark of one connection: what it runs and what it reports, never how fast."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from spheret.benchmarking import op as module
from spheret.benchmarking.op import ADD, COPY, Junction, OpBench, bench_op
from spheret.benchmarking.results import to_table
from spheret.connections import build_connection

TINY = OpBench(schemes=("pre-ln", "proj", "spheret:p=learn-per-layer"), rows=16, dim=8, rounds=3, warmup=1)


def test_every_variant_is_timed_in_every_round_in_changing_order() -> None:
    order: list[str] = []
    result = bench_op(TINY, on_sample=lambda name, *_: order.append(name))
    names = [COPY, ADD, *TINY.schemes]
    rounds = [order[i : i + len(names)] for i in range(0, len(order), len(names))]
    assert all(sorted(turn) == sorted(names) for turn in rounds) and len(rounds) == TINY.rounds
    assert len({tuple(turn) for turn in rounds}) > 1
    assert [v["variant"] for v in result["variants"]] == [COPY, ADD, *TINY.schemes]
    assert all(len(v["seconds"]) == len(v["ratios"]) == TINY.rounds for v in result["variants"])
    (baseline,) = [v for v in result["variants"] if v["variant"] == result["baseline"]]
    assert baseline["ratios"] == [1.0] * TINY.rounds
    assert json.loads(json.dumps(result)) == result
    assert len(to_table(result)) == 5
    bytes_of = {v["variant"]: v["moved_bytes"] for v in result["variants"]}
    unit = 4 * TINY.rows * TINY.dim
    assert bytes_of[COPY] == 2 * unit and bytes_of[ADD] == 6 * unit  # forward, and the sum of two gradients
    assert all(v["bandwidth_share"] > 0 for v in result["variants"] if v["moved_bytes"])


def test_the_caches_are_emptied_before_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(module, "flush_function", lambda device: lambda: events.append("flush"))
    bench_op(replace(TINY, cold=True), on_sample=lambda name, *_: events.append(name))
    names = len([COPY, ADD, *TINY.schemes])
    timed = events[TINY.warmup * names :]
    assert len(timed) == 2 * TINY.rounds * names and set(timed[::2]) == {"flush"} and "flush" not in timed[1::2]


def test_a_junction_makes_the_stream_and_the_next_input() -> None:
    h, f = torch.randn(3, 8), torch.randn(3, 8)
    pre_ln = build_connection("pre-ln", dim=8, n_layer=2)
    stream, branch = Junction(pre_ln)(h, f)
    torch.testing.assert_close(stream, h + f)
    torch.testing.assert_close(branch, torch.nn.functional.layer_norm(h + f, (8,)))


@pytest.mark.parametrize(
    ("change", "words"),
    [({"rows": 0}, "rows = 0"), ({"dtype": "int8"}, "int8"), ({"schemes": ("nope",)}, "unknown scheme 'nope'")],
)
def test_bad_settings_are_named(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OpBench(**change)  # type: ignore[arg-type]
