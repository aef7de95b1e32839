from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spheret.data import ByteTokenizer, Tokenizer, load_gpt2
from spheret.data.sources import read_documents
from spheret.data.tokenization import ByteLevelBPE, encode_documents, load_tokenizer, save_tokenizer, train_bpe
from spheret.data.tokenization import base as base_module
from spheret.data.tokenization.base import split_text

AWKWARD = "NUL \0, emoji \U0001f600, CRLF\r\n\r\nempty lines\n\n\n\ttab é 漢字 <|endoftext|> it's  done \n"
TRAINING = ["the cat sat on the mat\n" * 5, "the dog ate the cat's food, didn't it?\n" * 5]


@pytest.fixture(scope="module")
def gpt2(shared_data: Path) -> ByteLevelBPE:
    return load_gpt2(shared_data / "tokenizer")


@pytest.fixture(scope="module", params=["bytes", "bpe", "gpt2"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "gpt2":
        return request.getfixturevalue("gpt2")  # type: ignore[no-any-return]
    return ByteTokenizer() if request.param == "bytes" else train_bpe(TRAINING, 300)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())


def test_awkward_text_round_trips_without_separator(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(AWKWARD)
    assert tokenizer.decode(ids) == AWKWARD
    assert tokenizer.eot_id not in ids and max(ids) < tokenizer.vocab_size
    (batch,) = tokenizer.encode_batch([AWKWARD])
    assert batch.tolist() == ids


def test_the_literal_separator_is_ordinary_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.eot_id not in ids and len(ids) > 3
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_decode_never_raises(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab")
    assert tokenizer.decode([-1, *ids, tokenizer.eot_id, tokenizer.vocab_size, 50_303, 2**40]) == "ab"
    assert tokenizer.decode(np.array(ids)) == "ab"
    assert "\ufffd" in tokenizer.decode(tokenizer.encode("😀")[:1])
    assert tokenizer.decode([]) == ""


def test_token_bytes_cover_the_vocabulary(tokenizer: Tokenizer) -> None:
    sizes = tokenizer.token_bytes()
    assert sizes.dtype == np.int32 and sizes.shape == (tokenizer.vocab_size,)
    assert np.flatnonzero(sizes == 0).tolist() == [tokenizer.eot_id]


def test_saved_tokenizers_come_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    entry = save_tokenizer(tokenizer, tmp_path)
    again = load_tokenizer(tmp_path, entry)
    assert (again.name, again.fingerprint, again.encode(AWKWARD)) == (
        tokenizer.name,
        tokenizer.fingerprint,
        tokenizer.encode(AWKWARD),
    )


def test_an_exchanged_tokenizer_file_is_an_error(tmp_path: Path) -> None:
    entry = save_tokenizer(train_bpe(TRAINING, 300), tmp_path)
    save_tokenizer(train_bpe(TRAINING, 280), tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not the tokenizer"):
        load_tokenizer(tmp_path, entry)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer file"):
        load_tokenizer(tmp_path, entry)


def test_bytes_are_bytes() -> None:
    assert ByteTokenizer().encode("A\0é") == [65, 0, 195, 169]
    assert (ByteTokenizer.vocab_size, ByteTokenizer.eot_id) == (257, 256)


def test_bpe_has_the_vocabulary_asked_for() -> None:
    tokenizer = train_bpe(TRAINING, 280)
    assert (tokenizer.vocab_size, tokenizer.eot_id, tokenizer.name) == (280, 279, "bpe:280")
    assert len(tokenizer.encode("the cat")) < len("the cat")


def test_bpe_stops_when_nothing_is_left_to_merge() -> None:
    tokenizer = train_bpe(["ababab"], 4096)
    assert 257 <= tokenizer.vocab_size < 300 and tokenizer.eot_id == tokenizer.vocab_size - 1


def test_bpe_training_is_deterministic_across_processes_and_threads(shared_data: Path) -> None:
    path = shared_data / "corpora" / "tinyshakespeare.txt"
    code = (
        "import sys; from spheret.data.tokenization import train_bpe\n"
        "text = open(sys.argv[1], encoding='utf-8').read()[:300_000]\n"
        "t = train_bpe(text.split('\\n\\n'), 800)\n"
        "print(t.fingerprint, sum(i * x for i, x in enumerate(t.encode(text))))"
    )
    results = {
        subprocess.run(
            [sys.executable, "-c", code, str(path)],
            env={**os.environ, "TOKENIZERS_PARALLELISM": parallel, "RAYON_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for parallel, threads in (("false", "1"), ("true", "3"))
    }
    assert len(results) == 1 and results != {""}


def test_gpt2_facts(gpt2: ByteLevelBPE) -> None:
    assert gpt2.encode("Hello world") == [15496, 995]
    assert (gpt2.vocab_size, gpt2.eot_id, gpt2.name) == (50257, 50256, "gpt2")


@given(st.text(st.sampled_from(list("abAB12 \n\t\r'sdt.,!\u00a0\u3000é漢😀\x1c\x85")), max_size=60), st.integers(1, 12))
@settings(max_examples=300)
def test_pieces_encode_like_the_whole(gpt2: ByteLevelBPE, text: str, limit: int) -> None:
    pieces = split_text(text, limit)
    assert "".join(pieces) == text
    assert [i for piece in pieces for i in gpt2.encode(piece)] == gpt2.encode(text)


def test_long_text_is_cut() -> None:
    assert split_text("aaa bbb\nccc ddd", 4) == ["aaa bbb\n", "ccc ddd"]
    assert split_text("aaaa  bbbb  cccc", 2) == ["aaaa  bbbb  cccc"]


def test_documents_keep_order_labels_and_separators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_module, "BATCH_CHARACTERS", 10)
    documents = [(i, "x" * (i % 7)) for i in range(20)]
    parts = list(encode_documents(ByteTokenizer(), documents))
    assert [label for label, _ in parts] == list(range(20))
    assert [ids.tolist() for _, ids in parts] == [[120] * (i % 7) + [256] for i in range(20)]


def test_gpt2_reproduces_nanogpts_file_byte_for_byte(gpt2: ByteLevelBPE, shared_data: Path) -> None:
    pytest.importorskip("pyarrow")
    texts = read_documents(shared_data / "corpora" / "openwebtext_val.parquet", "text")
    ids = [part for _, part in encode_documents(gpt2, ((None, text) for text in texts))]
    golden = (shared_data / "corpora" / "openwebtext_val.bin").read_bytes()
    assert np.concatenate(ids).astype("<u2").tobytes() == golden


def test_gpt2_under_hugging_face_names_and_variable(
    gpt2: ByteLevelBPE, shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "merges.txt").write_bytes((shared_data / "tokenizer" / "vocab.bpe").read_bytes())
    (tmp_path / "vocab.json").write_bytes((shared_data / "tokenizer" / "encoder.json").read_bytes())
    monkeypatch.setenv("SPHERET_GPT2_DIR", str(tmp_path))
    assert load_gpt2().fingerprint == gpt2.fingerprint


def test_gpt2_through_tiktokens_cache(
    gpt2: ByteLevelBPE, shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tiktoken")
    names = {
        "vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
        "encoder.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
    }
    for name, cached in names.items():
        (tmp_path / cached).write_bytes((shared_data / "tokenizer" / name).read_bytes())
    monkeypatch.delenv("SPHERET_GPT2_DIR", raising=False)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    assert load_gpt2().fingerprint == gpt2.fingerprint


def test_offline_gpt2_error_names_files_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise OSError("network disabled")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.delenv("SPHERET_GPT2_DIR", raising=False)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"vocab\.bpe and encoder\.json.*SPHERET_GPT2_DIR") as caught:
        load_gpt2()
    assert str(tmp_path) in str(caught.value)
    assert ByteTokenizer().decode(ByteTokenizer().encode("works")) == "works"


def test_a_folder_with_other_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"vocab\.bpe and encoder\.json or merges\.txt and vocab\.json"):
        load_gpt2(tmp_path)
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\na b\n")
    (tmp_path / "encoder.json").write_text('{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}')
    with pytest.raises(ValueError, match="not GPT-2's"):
        load_gpt2(tmp_path)
    (tmp_path / "encoder.json").write_text("[]")
    with pytest.raises(ValueError, match="no byte-level BPE"):
        load_gpt2(tmp_path)
