from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spheret.data import DataConfig, Dataset, Shard, prepare, sample_batch, write_shard
from spheret.data.shards import HEADER_BYTES
from spheret.data.split import decide

AWKWARD = "NUL \0, emoji \U0001f600, CRLF\r\n\r\nempty lines\n\n\n\ttab <|endoftext|>"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPHERET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "datasets"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """40 rows, two of them the same."""
    path = tmp_path / "rows.jsonl"
    texts = [f"document number {i}, with the square {i * i}" for i in range(39)] + [
        "document number 3, with the square 9"
    ]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def documents(shard: Shard, dataset: Dataset) -> list[str]:
    ids = shard.tokens
    ends = np.flatnonzero(ids == dataset.tokenizer.eot_id)
    starts = [0, *(ends[:-1] + 1)]
    assert ends[-1] == len(ids) - 1
    return [dataset.tokenizer.decode(ids[start:end].tolist()) for start, end in zip(starts, ends, strict=True)]


def config(*data: Path, tokenizer: str = "bytes", **settings: object) -> DataConfig:
    return DataConfig(data=tuple(map(str, data)), tokenizer=tokenizer, **settings)  # type: ignore[arg-type]


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[HEADER_BYTES + 3] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_every_document_is_on_exactly_one_side(corpus: Path, tokenizer: str) -> None:
    dataset = prepare(config(corpus, tokenizer=tokenizer))
    train, val = documents(dataset.train, dataset), documents(dataset.val, dataset)
    original = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    assert sorted(train + val) == sorted(original)
    assert val and not set(train) & set(val)
    assert [text for text in original if text in set(train)] == train


def test_manifest_says_what_is_there(corpus: Path) -> None:
    dataset = prepare(config(corpus))
    manifest = json.loads((dataset.path / "manifest.json").read_text())
    assert manifest == dataset.manifest
    (source,) = manifest["sources"]
    assert (source["name"], source["files"], source["bytes"]) == ("rows.jsonl", 1, corpus.stat().st_size)
    for side, shard in (("train", dataset.train), ("val", dataset.val)):
        texts = documents(shard, dataset)
        assert manifest[side] == {
            "tokens": len(shard),
            "documents": len(texts),
            "bytes": sum(len(text.encode()) for text in texts),
            "sha256": shard.sha256,
        }
    assert manifest["split"] == {"rule": "by-document", "val_fraction": 0.1, "seed": 0, "corpus_documents": 40}
    assert manifest["tokenizer"]["vocab_size"] == 257 and "tokenizers" in manifest["versions"]
    assert str(corpus.parent) not in json.dumps(manifest)
    assert dataset.summary() == {
        "name": "rows.jsonl",
        "fingerprint": dataset.fingerprint,
        "tokenizer": "bytes",
        "vocab_size": 257,
        "train_tokens": len(dataset.train),
        "val_tokens": len(dataset.val),
    }


def test_second_call_finds_the_first(corpus: Path, cache: Path) -> None:
    lines: list[str] = []
    first = prepare(config(corpus), progress=lines.append)
    before = (first.path / "train.shard").stat().st_mtime_ns
    second = prepare(config(corpus), progress=lines.append)
    assert second.path == first.path == cache / first.fingerprint
    assert (first.path / "train.shard").stat().st_mtime_ns == before
    assert lines[0].startswith("reading rows.jsonl") and lines[-1].startswith("found prepared data")


def test_fingerprint_follows_contents(corpus: Path, tmp_path: Path) -> None:
    base = prepare(config(corpus)).fingerprint
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes(corpus.read_bytes())
    assert prepare(config(moved)).fingerprint == base
    changed = tmp_path / "changed.jsonl"
    changed.write_bytes(corpus.read_bytes().replace(b"square 9", b"square 8"))
    others = [
        config(changed),
        config(corpus, tokenizer="bpe:300"),
        config(corpus, tokenizer="bpe:301"),
        config(corpus, val_fraction=0.2),
        config(corpus, split_seed=1),
        config(corpus, corpus),
    ]
    assert len({base, *(prepare(other).fingerprint for other in others)}) == 7


def test_a_single_text_file_is_cut_at_a_line(tmp_path: Path) -> None:
    lines = [f"line {i:03}\r\n" for i in range(100)]
    (tmp_path / "a.txt").write_bytes("".join(lines).encode())
    dataset = prepare(config(tmp_path / "a.txt"))
    assert documents(dataset.train, dataset) == ["".join(lines[:90])]
    assert documents(dataset.val, dataset) == ["".join(lines[90:])]
    assert dataset.manifest["split"]["rule"] == "cut-single-document"


def test_awkward_text_survives(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_bytes((name + AWKWARD).encode())
    for tokenizer in ("bytes", "bpe:280"):
        dataset = prepare(config(tmp_path / "a.txt", tmp_path / "b.txt", tokenizer=tokenizer))
        found = documents(dataset.train, dataset) + documents(dataset.val, dataset)
        assert sorted(found) == ["a" + AWKWARD, "b" + AWKWARD]


def test_bpe_is_trained_on_the_training_side(tmp_path: Path) -> None:
    rows = [{"text": f"{'zqzqzqzq' * 50 if i else 'vwvwvwvw' * 200} {i}"} for i in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [row["text"] for row in rows]
    seed = next(s for s in range(1000) if next(decide(texts, 0.1, s).sides(texts))[0])
    tokenizer = prepare(config(tmp_path / "a.jsonl", tokenizer="bpe:300", split_seed=seed)).tokenizer
    assert len(tokenizer.encode("zqzqzqzq")) < 4 and len(tokenizer.encode("vwvwvwvw")) == 8


def test_open_needs_no_corpus(corpus: Path) -> None:
    made = prepare(config(corpus, tokenizer="bpe:300"))
    corpus.unlink()
    dataset = Dataset.open(made.path, verify=True)
    assert (dataset.fingerprint, dataset.train, dataset.val) == (made.fingerprint, made.train, made.val)
    assert dataset.tokenizer.encode("document") == made.tokenizer.encode("document")
    x, _ = sample_batch(dataset.train, batch_size=2, block_size=8, seed=0, step=0)
    assert x.shape == (2, 8)


def test_open_names_what_is_wrong(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        Dataset.open(tmp_path)
    folder = prepare(config(corpus)).path
    manifest = json.loads((folder / "manifest.json").read_text())
    damage(folder / "val.shard")
    Dataset.open(folder)
    with pytest.raises(ValueError, match=r"val\.shard is damaged"):
        Dataset.open(folder, verify=True)
    os.replace(folder / "train.shard", folder / "val.shard")
    with pytest.raises(FileNotFoundError, match=r"train\.shard"):
        Dataset.open(folder)
    (folder / "train.shard").write_bytes((folder / "val.shard").read_bytes())
    with pytest.raises(ValueError, match=r"val\.shard is not the shard"):
        Dataset.open(folder)
    for text, named in (
        (json.dumps({**manifest, "format": 2}), "format 2.*update"),
        (json.dumps({"format": 1}), "incomplete"),
        ("[]", "not the manifest"),
        ("{", "damaged"),
    ):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match=named):
            Dataset.open(folder)


@pytest.mark.parametrize("name", ["train.shard", "val.shard", "manifest.json", "tokenizer.json"])
@pytest.mark.parametrize("how", ["cut", "remove"])
def test_a_damaged_cache_entry_is_made_again(corpus: Path, cache: Path, name: str, how: str) -> None:
    settings = config(corpus, tokenizer="bpe:300")
    first = prepare(settings)
    path = first.path / name
    path.write_bytes(path.read_bytes()[:-30]) if how == "cut" else path.unlink()
    again = prepare(settings)
    again.verify()
    assert (again.train, again.val) == (first.train, first.val)
    assert [entry.name for entry in cache.iterdir()] == [first.fingerprint]


def test_one_flipped_byte_in_the_cache_is_found(corpus: Path) -> None:
    first = prepare(config(corpus))
    sound = first.train.tokens.tolist()
    damage(first.train.path)
    assert prepare(config(corpus)).train.tokens.tolist() == sound


@pytest.mark.parametrize("side", ["train", "val"])
@pytest.mark.parametrize("vocab_size", [200, 300])
def test_a_shard_of_another_vocabulary_than_the_tokenizer_is_refused(side: str, vocab_size: int, corpus: Path) -> None:
    """Intact in itself, and described by its manifest, but its ids mean something else."""
    dataset = prepare(config(corpus))
    path = dataset.path / f"{side}.shard"
    foreign = write_shard(path, [np.arange(150)] * 30, vocab_size)
    manifest = json.loads((dataset.path / "manifest.json").read_text())
    manifest[side] |= {"tokens": foreign.n_tokens, "sha256": foreign.sha256}
    (dataset.path / "manifest.json").write_text(json.dumps(manifest))
    for verify in (False, True):
        with pytest.raises(ValueError, match=rf"{side}\.shard .* {vocab_size} ids, .* has 257: prepare"):
            Dataset.open(dataset.path, verify=verify)
    with pytest.raises(ValueError, match=rf"{vocab_size} ids, .* has 257"):
        replace(dataset, **{side: foreign})


def test_errors_leave_nothing_behind(corpus: Path, cache: Path) -> None:
    with corpus.open("a") as file:
        file.write("{broken\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 41"):
        prepare(config(corpus))
    assert list(cache.iterdir()) == []


def test_old_leftovers_are_removed(corpus: Path, cache: Path) -> None:
    old, new = cache / ".0123.abc.tmp", cache / ".4567.abc.tmp"
    old.mkdir(parents=True)
    new.mkdir()
    (old / "train.shard").write_text("half")
    os.utime(old, (time.time() - 10**6,) * 2)
    prepare(config(corpus))
    assert not old.exists() and new.exists()


def test_out_is_written_once_and_kept(corpus: Path, tmp_path: Path, cache: Path) -> None:
    out = tmp_path / "deep" / "out"
    first = prepare(config(corpus), out=out)
    assert first.path == out and not cache.exists()
    before = (out / "train.shard").stat().st_mtime_ns
    assert prepare(config(corpus), out=out).fingerprint == first.fingerprint
    assert (out / "train.shard").stat().st_mtime_ns == before
    with pytest.raises(FileExistsError, match=f"{first.fingerprint}.*new folder"):
        prepare(config(corpus, split_seed=1), out=out)
    damage(out / "train.shard")
    (out / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"notes\.txt"):
        prepare(config(corpus), out=out)
    (out / "notes.txt").unlink()
    prepare(config(corpus), out=out).verify()


def test_out_never_overwrites_anything_else(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    prepare(config(corpus), out=tmp_path / "mine").verify()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    for name in ("thesis", "file"):
        with pytest.raises(FileExistsError, match=f"{name} holds something else"):
            prepare(config(corpus), out=tmp_path / name)
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


def test_concurrent_callers_agree(corpus: Path, cache: Path) -> None:
    code = (
        "import sys, json; from spheret.data import DataConfig, prepare\n"
        "sys.stdin.readline()\n"
        "d = prepare(DataConfig(data=(sys.argv[1],), tokenizer='bpe:300')); d.verify()\n"
        "print(d.path, d.fingerprint, d.train.sha256)"
    )
    arguments = [sys.executable, "-c", code, str(corpus)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    callers = [subprocess.Popen(arguments, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    for caller in callers:
        caller.stdin.write("go\n")
        caller.stdin.flush()
    outputs = {caller.communicate()[0] for caller in callers}
    assert [caller.returncode for caller in callers] == [0, 0]
    assert len(outputs) == 1
    assert [entry.name for entry in cache.iterdir()] == [outputs.pop().split()[1]]


def test_the_later_of_two_finished_folders_is_dropped(corpus: Path, cache: Path) -> None:
    """Another caller finishes while this one is at work: its folder stays, and this call returns it."""
    settings = config(corpus)
    finished: list[int] = []

    def meanwhile(line: str) -> None:
        if not finished:
            finished.append(prepare(settings).train.path.stat().st_ino)

    late = prepare(settings, progress=meanwhile)
    assert late.train.path.stat().st_ino == finished[0]
    assert [entry.name for entry in cache.iterdir()] == [late.fingerprint]


def test_missing_gpt2_files_show_before_the_corpus_is_read(corpus: Path, tmp_path: Path) -> None:
    corpus.write_text("{broken\n")
    with pytest.raises(FileNotFoundError, match=r"vocab\.bpe"):
        prepare(config(corpus, tokenizer=f"gpt2:{tmp_path}"))


def test_gpt2_needs_its_files_once(corpus: Path, shared_data: Path) -> None:
    made = prepare(config(corpus, tokenizer=f"gpt2:{shared_data / 'tokenizer'}"))
    found = prepare(config(corpus, tokenizer="gpt2:/nowhere"))
    assert found.path == made.path
    assert found.tokenizer.encode("Hello world") == [15496, 995]
    assert found.train.dtype == np.uint16 and found.train.vocab_size == 50257


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """100 MB of text in three files, at a fraction of that in memory."""
    pytest.importorskip("resource")
    line = "a line of quite ordinary text, number {}\n"
    for name in ("a.txt", "b.txt"):
        with (tmp_path / name).open("w") as file:
            for part in range(40):
                file.write("".join(line.format(part * 25_000 + i) for i in range(25_000))[: 2**20])
    with (tmp_path / "c.jsonl").open("w") as file:
        for row in range(2000):
            file.write(json.dumps({"text": line.format(row) * 240}) + "\n")
    code = (
        "import sys, resource; from spheret.data import DataConfig, prepare\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak(); d = prepare(DataConfig(data=tuple(sys.argv[1:])))\n"
        "print((peak() - before) // 1024, len(d.train) + len(d.val), len(d.val) / len(d.train))"
    )
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt", "c.jsonl")]
    done = subprocess.run([sys.executable, "-c", code, *files], capture_output=True, text=True, check=True)
    growth_mb, tokens, share = map(float, done.stdout.split())
    assert tokens > 1e8 and 0.03 < share < 0.3
    assert growth_mb < 50


def test_few_documents_are_reported(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name * 100)
    lines: list[str] = []
    prepare(config(tmp_path / "a.txt", tmp_path / "b.txt"), progress=lines.append)
    assert lines[-1].startswith("validation holds 50.0% of the text, not 10.0%")


def test_real_corpora(shared_data: Path) -> None:
    pytest.importorskip("pyarrow")
    corpora = shared_data / "corpora"
    dataset = prepare(config(corpora / "fineweb_edu_150.parquet", corpora / "sotu.jsonl.xz"))
    manifest = dataset.manifest
    assert manifest["train"]["bytes"] + manifest["val"]["bytes"] == 413_121 + 10_761_413
    assert manifest["train"]["documents"] + manifest["val"]["documents"] == 150 + 233
    assert dataset.name == "fineweb_edu_150.parquet+sotu.jsonl.xz"
    assert 0.03 < manifest["val"]["bytes"] / manifest["train"]["bytes"] < 0.3


def test_stdlib_is_the_default() -> None:
    dataset = prepare(DataConfig())
    assert dataset.name == "stdlib" and dataset.manifest["sources"][0]["revision"].endswith(sys.version.split()[0])
    assert len(dataset.train) > 3e6 and len(dataset.val) > 1e5
    assert dataset.tokenizer.vocab_size == 257
