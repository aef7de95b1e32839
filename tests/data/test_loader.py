from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spheret.data import Shard, fixed_windows, sample_batch, write_shard


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Shard:
    """Token i has id i, so a window tells where it was cut."""
    return write_shard(tmp_path_factory.mktemp("loader") / "a.shard", [np.arange(1000)], 1000)


def short(folder: Path, n: int) -> Shard:
    return write_shard(folder / "short.shard", [np.arange(n)], max(n, 1))


def test_targets_are_inputs_one_later(counting: Shard) -> None:
    x, y = sample_batch(counting, batch_size=64, block_size=10, seed=0, step=0)
    assert x.shape == y.shape == (64, 10) and x.dtype == y.dtype == np.int64
    assert not isinstance(x, np.memmap)
    assert (y == x + 1).all() and (np.diff(x, axis=1) == 1).all()


def test_a_batch_depends_on_seed_and_step_alone(counting: Shard) -> None:
    def batch(seed: int, step: int) -> list[list[int]]:
        return sample_batch(counting, batch_size=8, block_size=4, seed=seed, step=step)[0].tolist()

    batches = {(seed, step): batch(seed, step) for seed in range(3) for step in range(20)}
    np.random.seed(5)
    assert all(batch(seed, step) == value for (seed, step), value in reversed(batches.items()))
    assert len({str(value) for value in batches.values()}) == 60


def test_batches_stay_the_same_between_releases(counting: Shard) -> None:
    x, _ = sample_batch(counting, batch_size=4, block_size=2, seed=1337, step=7)
    assert x[:, 0].tolist() == [368, 379, 681, 227]


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**64 - 1), st.integers(0, 10**9))
def test_ranks_share_the_global_batch(counting: Shard, world: int, share: int, seed: int, step: int) -> None:
    arguments = {"batch_size": world * share, "block_size": 5, "seed": seed, "step": step}
    whole = sample_batch(counting, **arguments)
    parts = [sample_batch(counting, **arguments, rank=rank, world_size=world) for rank in range(world)]
    for index in range(2):
        assert np.array_equal(np.concatenate([part[index] for part in parts]), whole[index])


def test_every_window_is_reached_equally(tmp_path: Path) -> None:
    shard = short(tmp_path, 13)
    starts = np.concatenate(
        [sample_batch(shard, batch_size=64, block_size=8, seed=1, step=s)[0][:, 0] for s in range(50)]
    )
    counts = np.bincount(starts, minlength=5)
    assert len(counts) == 5 and counts.min() > 500  # 640 each on average, standard deviation 23


def test_a_text_shorter_than_the_context_names_both(tmp_path: Path) -> None:
    shard = short(tmp_path, 5)
    for call in (
        lambda: sample_batch(shard, batch_size=1, block_size=8, seed=0, step=0),
        lambda: fixed_windows(shard, n_windows=1, block_size=8),
    ):
        with pytest.raises(ValueError, match=r"holds 5 tokens.*block size 8 needs at least 9"):
            call()


def test_the_shortest_text_is_one_window(tmp_path: Path) -> None:
    shard = short(tmp_path, 9)
    x, y = sample_batch(shard, batch_size=3, block_size=8, seed=0, step=0)
    assert x.tolist() == [list(range(8))] * 3 and y.tolist() == [list(range(1, 9))] * 3
    assert fixed_windows(shard, n_windows=4, block_size=8)[0].tolist() == [list(range(8))]


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"batch_size": 3, "world_size": 2},
        {"rank": 2, "world_size": 2},
        {"rank": -1},
        {"seed": -1},
        {"step": -1},
        {"block_size": 0},
    ],
)
def test_wrong_arguments_are_named(counting: Shard, wrong: dict[str, int]) -> None:
    arguments = {"batch_size": 4, "block_size": 4, "seed": 0, "step": 0, **wrong}
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
        sample_batch(counting, **arguments)


@given(st.integers(2, 60), st.integers(1, 12), st.integers(1, 20))
def test_fixed_windows_are_spread_evenly(counting: Shard, length: int, block: int, count: int) -> None:
    shard = short(counting.path.parent, length)
    if length < block + 1:
        return
    x, y = fixed_windows(shard, n_windows=count, block_size=block)
    starts = x[:, 0]
    assert len(starts) == min(count, length - block) == len(set(starts.tolist()))
    assert (y == x + 1).all() and starts[0] == 0
    assert len(starts) == 1 or y[-1, -1] == length - 1
    gaps = np.diff(starts)
    assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1
    if count * block < length:
        assert len(starts) == count and (len(gaps) == 0 or gaps.min() >= block)


def test_no_window_is_an_error(counting: Shard) -> None:
    with pytest.raises(ValueError, match="n_windows=0"):
        fixed_windows(counting, n_windows=0, block_size=4)


def test_memory_does_not_grow_with_batches(tmp_path: Path) -> None:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("resident memory is read from /proc")

    def resident_mb() -> float:
        return int(statm.read_text().split()[1]) * 4096 / 1e6

    shard = write_shard(tmp_path / "a.shard", (np.full(10**7, i, np.uint16) for i in range(10)), 100)
    sample_batch(shard, batch_size=32, block_size=256, seed=0, step=0)
    before = resident_mb()
    for step in range(2000):
        sample_batch(shard, batch_size=32, block_size=256, seed=0, step=step)
    assert resident_mb() - before < 50
