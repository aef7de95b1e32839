from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spheret.data import Shard, ShardWriter, unigram_loss, write_shard
from spheret.data.shards import HEADER_BYTES, VERSION


def make(folder: Path, n: int = 100) -> Shard:
    return write_shard(folder / "a.shard", [np.arange(n) % 7], 7, eot_id=0)


@given(
    st.integers(1, 2**32).flatmap(
        lambda vocab: st.tuples(st.just(vocab), st.lists(st.lists(st.integers(0, vocab - 1), max_size=5), max_size=4))
    )
)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, case: tuple[int, list[list[int]]]) -> None:
    vocab, chunks = case
    path = tmp_path_factory.getbasetemp() / "round.shard"
    written = write_shard(path, [np.array(chunk, np.int64) for chunk in chunks], vocab, eot_id=0)
    shard = Shard.open(path, verify=True)
    flat = [i for chunk in chunks for i in chunk]
    assert shard == written
    assert shard.tokens.tolist() == flat and len(shard) == len(flat)
    assert (shard.vocab_size, shard.n_documents) == (vocab, flat.count(0))
    assert shard.dtype == (np.uint16 if vocab <= 65_535 else np.uint32)


@pytest.mark.parametrize(("vocab", "dtype"), [(65_535, np.uint16), (65_536, np.uint32), (70_001, np.uint32)])
def test_large_vocabularies_never_wrap(tmp_path: Path, vocab: int, dtype: type) -> None:
    shard = write_shard(tmp_path / "a.shard", [np.array([vocab - 1, 1])], vocab)
    assert shard.dtype == dtype and shard.tokens.tolist() == [vocab - 1, 1]


@pytest.mark.parametrize("bad", [70_000, 50_257, -1, 2**40])
def test_ids_out_of_range_are_errors_and_leave_no_file(tmp_path: Path, bad: int) -> None:
    with pytest.raises(ValueError, match=f"{bad} is outside the vocabulary of 50257"):
        write_shard(tmp_path / "a.shard", [np.array([1, 2]), np.array([3, bad])], 50_257)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ids", [np.array([1.5]), np.array([[1, 2]]), np.array([True])])
def test_only_rows_of_integers(tmp_path: Path, ids: np.ndarray) -> None:
    with pytest.raises(TypeError, match="1-d integer array"):
        write_shard(tmp_path / "a.shard", [ids], 10)


def test_any_flipped_byte_is_found(tmp_path: Path) -> None:
    path = make(tmp_path).path
    sound = path.read_bytes()
    Shard.open(path, verify=True)
    for position in range(len(sound)):
        path.write_bytes(sound[:position] + bytes([sound[position] ^ 1]) + sound[position + 1 :])
        with pytest.raises(ValueError, match=r"a\.shard"):
            Shard.open(path, verify=True)


@pytest.mark.parametrize("keep", [0, 5, 8, 100, HEADER_BYTES, HEADER_BYTES + 3, HEADER_BYTES + 199])
def test_truncated_files_are_errors(tmp_path: Path, keep: int) -> None:
    path = make(tmp_path).path
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"a\.shard"):
        Shard.open(path)


def test_other_files_and_newer_versions_are_errors(tmp_path: Path) -> None:
    path = make(tmp_path).path
    newer = bytearray(path.read_bytes())
    newer[8] = VERSION + 1
    path.write_bytes(newer)
    with pytest.raises(ValueError, match=f"version {VERSION + 1}.*update"):
        Shard.open(path)
    path.write_bytes(b"some text that is not a shard" * 20)
    with pytest.raises(ValueError, match="not a token shard"):
        Shard.open(path)
    with pytest.raises(FileNotFoundError, match=r"b\.shard"):
        Shard.open(tmp_path / "b.shard")


def test_an_exception_leaves_the_old_file(tmp_path: Path) -> None:
    old = make(tmp_path)
    with pytest.raises(RuntimeError), ShardWriter(old.path, vocab_size=7) as writer:
        writer.append(np.array([1, 2, 3]))
        raise RuntimeError("stop")
    assert Shard.open(old.path, verify=True) == old
    assert list(tmp_path.iterdir()) == [old.path]


def test_a_killed_writer_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    code = (
        "import os, sys, numpy as np\n"
        "from spheret.data import ShardWriter\n"
        "with ShardWriter(sys.argv[1], vocab_size=7) as writer:\n"
        "    writer.append(np.ones(10**6, int))\n"
        "    os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.shard")]).returncode == 9
    assert not (tmp_path / "a.shard").exists()


def test_a_shard_can_be_pickled(tmp_path: Path) -> None:
    shard = make(tmp_path)
    assert pickle.loads(pickle.dumps(shard)) == shard


def test_tokens_are_read_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="read-only"):
        make(tmp_path).tokens[0] = 1


def test_an_id_outside_the_vocabulary_of_the_header_is_found(tmp_path: Path) -> None:
    """A shard from elsewhere, whose hash is right."""
    shard = out_of_range(tmp_path / "a.shard", highest=300, vocab_size=257)
    with pytest.raises(ValueError, match=r"a\.shard holds token id 300, but its vocabulary has 257 ids"):
        Shard.open(shard.path, verify=True)
    with pytest.raises(ValueError, match="token id 300"):
        unigram_loss(shard, np.array([0, 1]))


def out_of_range(path: Path, *, highest: int, vocab_size: int) -> Shard:
    shard = write_shard(path, [np.array([0, 1, highest, 2])], highest + 1)
    writer = ShardWriter(path, vocab_size=vocab_size)
    writer.n_tokens, writer._hash = 4, hashlib.sha256(shard.tokens.tobytes())
    path.write_bytes(writer._header() + shard.tokens.tobytes())
    return Shard.open(path)
