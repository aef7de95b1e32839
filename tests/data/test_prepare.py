from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import damage_shard, data_config

from spheret.data import DataConfig, Dataset, Shard, prepare, sample_batch, settled, write_shard
from spheret.data.sources import Census, Source
from spheret.data.split import decide

AWKWARD = "NUL \0, emoji \U0001f600, CRLF\r\n\r\nempty lines\n\n\n\ttab <|endof text|>"


def documents(shard: Shard, dataset: Dataset) -> list[str]:
    ids = shard.tokens
    ends = np.flatnonzero(ids == dataset.tokenizer.eot_id)
    starts = [0, *(ends[:-1] + 1)]
    assert ends[-1] == len(ids) - 1
    return [dataset.tokenizer.decode(ids[start:end].tolist()) for start, end in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_every_document_is_on_exactly_one_side(corpus: Path, tokenizer: str) -> None:
    dataset = prepare(data_config(corpus, tokenizer=tokenizer))
    train, val = documents(dataset.train, dataset), documents(dataset.val, dataset)
    original = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    assert sorted(train + val) == sorted(original)
    assert val and not set(train) & set(val)
    assert [text for text in original if text in set(train)] == train


def test_manifest_says_what_is_there(corpus: Path) -> None:
    dataset = prepare(data_config(corpus))
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
    first = prepare(data_config(corpus), progress=lines.append)
    before = (first.path / "train.shard").stat().st_mtime_ns
    second = prepare(data_config(corpus), progress=lines.append)
    assert second.path == first.path == cache / first.fingerprint
    assert (first.path / "train.shard").stat().st_mtime_ns == before
    assert lines[0].startswith("reading rows.jsonl") and lines[-1].startswith("found prepared data")


def test_fingerprint_follows_contents(corpus: Path, tmp_path: Path) -> None:
    base = prepare(data_config(corpus)).fingerprint
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes(corpus.read_bytes())
    assert prepare(data_config(moved)).fingerprint == base
    changed = tmp_path / "changed.jsonl"
    changed.write_bytes(corpus.read_bytes().replace(b"square 9", b"square 8"))
    others = [
        data_config(changed),
        data_config(corpus, tokenizer="bpe:300"),
        data_config(corpus, tokenizer="bpe:301"),
        data_config(corpus, val_fraction=0.2),
        data_config(corpus, split_seed=1),
        data_config(corpus, corpus),
    ]
    assert len({base, *(prepare(other).fingerprint for other in others)}) == 7


def test_a_single_text_file_is_cut_at_a_line(tmp_path: Path) -> None:
    lines = [f"line {i:03}\r\n" for i in range(100)]
    (tmp_path / "a.txt").write_bytes("".join(lines).encode())
    dataset = prepare(data_config(tmp_path / "a.txt"))
    assert documents(dataset.train, dataset) == ["".join(lines[:90])]
    assert documents(dataset.val, dataset) == ["".join(lines[90:])]
    assert dataset.manifest["split"]["rule"] == "cut-single-document"


def test_awkward_text_survives(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_bytes((name + AWKWARD).encode())
    for tokenizer in ("bytes", "bpe:280"):
        dataset = prepare(data_config(tmp_path / "a.txt", tmp_path / "b.txt", tokenizer=tokenizer))
        found = documents(dataset.train, dataset) + documents(dataset.val, dataset)
        assert sorted(found) == ["a" + AWKWARD, "b" + AWKWARD]


def test_bpe_is_trained_on_the_training_side(tmp_path: Path) -> None:
    rows = [{"text": f"{'zqzqzqzq' * 50 if i else 'vwvwvwvw' * 200} {i}"} for i in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [row["text"] for row in rows]
    seed = next(s for s in range(1000) if next(decide(texts, 0.1, s).sides(texts))[0])
    tokenizer = prepare(data_config(tmp_path / "a.jsonl", tokenizer="bpe:300", split_seed=seed)).tokenizer
    assert len(tokenizer.encode("zqzqzqzq")) < 4 and len(tokenizer.encode("vwvwvwvw")) == 8


def test_open_needs_no_corpus(corpus: Path) -> None:
    made = prepare(data_config(corpus, tokenizer="bpe:300"))
    corpus.unlink()
    dataset = Dataset.open(made.path, verify=True)
    assert (dataset.fingerprint, dataset.train, dataset.val) == (made.fingerprint, made.train, made.val)
    assert dataset.tokenizer.encode("document") == made.tokenizer.encode("document")
    x, _ = sample_batch(dataset.train, batch_size=2, block_size=8, seed=0, step=0)
    assert x.shape == (2, 8)


def test_open_names_what_is_wrong(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        Dataset.open(tmp_path)
    folder = prepare(data_config(corpus)).path
    manifest = json.loads((folder / "manifest.json").read_text())
    damage_shard(folder / "val.shard")
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
    settings = data_config(corpus, tokenizer="bpe:300")
    first = prepare(settings)
    path = first.path / name
    path.write_bytes(path.read_bytes()[:-30]) if how == "cut" else path.unlink()
    again = prepare(settings)
    again.verify()
    assert (again.train, again.val) == (first.train, first.val)
    assert [entry.name for entry in cache.iterdir()] == [first.fingerprint]


def test_one_flipped_byte_in_the_cache_is_found(corpus: Path) -> None:
    first = prepare(data_config(corpus))
    sound = first.train.tokens.tolist()
    damage_shard(first.train.path)
    assert prepare(data_config(corpus)).train.tokens.tolist() == sound


@pytest.mark.parametrize("side", ["train", "val"])
@pytest.mark.parametrize("vocab_size", [200, 300])
def test_a_shard_of_another_vocabulary_than_the_tokenizer_is_refused(side: str, vocab_size: int, corpus: Path) -> None:
    """Intact in itself, and described by its manifest, but its ids mean something else."""
    dataset = prepare(data_config(corpus))
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
        prepare(data_config(corpus))
    assert list(cache.iterdir()) == []


def test_missing_gpt2_files_show_before_the_corpus_is_read(corpus: Path, tmp_path: Path) -> None:
    corpus.write_text("{broken\n")
    with pytest.raises(FileNotFoundError, match=r"vocab\.bpe"):
        prepare(data_config(corpus, tokenizer=f"gpt2:{tmp_path}"))


def test_gpt2_needs_its_files_once(corpus: Path, shared_data: Path) -> None:
    made = prepare(data_config(corpus, tokenizer=f"gpt2:{shared_data / 'tokenizer'}"))
    found = prepare(data_config(corpus, tokenizer="gpt2:/nowhere"))
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
    prepare(data_config(tmp_path / "a.txt", tmp_path / "b.txt"), progress=lines.append)
    assert lines[-1].startswith("validation holds 50.0% of the text, not 10.0%")


def test_real_corpora(shared_data: Path) -> None:
    pytest.importorskip("pyarrow")
    corpora = shared_data / "corpora"
    dataset = prepare(data_config(corpora / "fineweb_edu_150.parquet", corpora / "sotu.jsonl.xz"))
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


def test_separators_and_empty_rows_are_reported(tmp_path: Path) -> None:
    """A corpus in one file, its documents divided by GPT-2's marker, as many are published."""
    (tmp_path / "a.txt").write_text("<|endoftext|>\n".join(f"story {i}\n" for i in range(30)))
    (tmp_path / "b.jsonl").write_text('{"text": null}\n' * 6)
    lines: list[str] = []
    dataset = prepare(data_config(tmp_path / "a.txt", tmp_path / "b.jsonl"), progress=lines.append)
    assert sorted(documents(dataset.train, dataset) + documents(dataset.val, dataset)) == sorted(
        ("\n" if i else "") + f"story {i}\n" for i in range(30)
    )
    assert {
        "6 of 7 rows hold no text and are skipped",
        "1 of 2 files hold no text: b.jsonl",
        "split at 29 separators <|endoftext|> inside the text",
    } <= set(lines)
    assert dataset.manifest["rows"] == {"all": 7, "empty": 6, "separators": 29}


def test_files_without_any_text_are_an_error(tmp_path: Path) -> None:
    for name, content in (("a.txt", b""), ("b.jsonl", b""), ("c.jsonl", b'{"text": ""}\n'), ("d.txt", b"\xef\xbb\xbf")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"no text in {name}"):
            prepare(data_config(tmp_path / name))


@pytest.mark.parametrize("how", ["append", "replace"])
def test_a_file_that_changes_while_it_is_read_is_an_error(corpus: Path, cache: Path, how: str) -> None:
    status = corpus.stat()

    def meanwhile(line: str) -> None:
        if line.startswith("reading"):
            rows = corpus.read_text()
            if how == "append":
                corpus.write_text(rows + '{"text": "one more"}\n')
            else:  # as long as before, with the old time
                corpus.write_text(rows.replace("square 9", "square 8"))
                os.utime(corpus, ns=(status.st_atime_ns, status.st_mtime_ns))

    with pytest.raises(ValueError, match=r"rows\.jsonl changed while it was read"):
        prepare(data_config(corpus), progress=meanwhile)
    assert list(cache.iterdir()) == []
    prepare(data_config(corpus)).verify()


def test_another_mode_or_link_is_no_change(corpus: Path, tmp_path: Path) -> None:
    """A backup that makes hard links must not end a preparation of hours."""

    def meanwhile(line: str) -> None:
        if line.startswith("reading"):
            os.link(corpus, tmp_path / "backup")

    prepare(data_config(corpus), progress=meanwhile)


def test_a_file_that_is_copied_over_itself_is_a_changed_one(
    corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its contents are the same before and after, but half of them while it is read."""
    whole, documents = corpus.read_bytes(), Source.documents

    def meanwhile(source: Source, column: str, census: Census | None = None) -> Iterator[str]:
        corpus.write_bytes(whole[: whole.index(b"\n", 600) + 1])
        yield from documents(source, column, census)
        corpus.write_bytes(whole)

    monkeypatch.setattr(Source, "documents", meanwhile)
    with pytest.raises(ValueError, match=r"rows\.jsonl changed while it was read"):
        prepare(data_config(corpus))
    assert list(cache.iterdir()) == []


def test_an_entry_of_before_separators_is_made_again(tmp_path: Path) -> None:
    """An earlier release tokenised the marker as text, under the same fingerprint."""
    (tmp_path / "a.txt").write_text("one<|endoftext|>two")
    made = prepare(data_config(tmp_path / "a.txt"))
    manifest = json.loads((made.path / "manifest.json").read_text())
    del manifest["rows"]
    (made.path / "manifest.json").write_text(json.dumps(manifest))
    assert "rows" in prepare(data_config(tmp_path / "a.txt")).manifest


def test_prepared_data_is_a_corpus(corpus: Path, tmp_path: Path, cache: Path) -> None:
    shards = tmp_path / "shards"
    made = prepare(data_config(corpus, tokenizer="bpe:300", val_fraction=0.2), out=shards)
    corpus.unlink()
    opened = prepare(data_config(shards))
    assert (opened.fingerprint, opened.path) == (made.fingerprint, shards) and not cache.exists()
    assert settled(data_config(shards)) == data_config(shards, tokenizer="bpe:300", val_fraction=0.2)
    assert settled(data_config(shards, tokenizer="bpe:300")).val_fraction == 0.2
    for wrong in ({"tokenizer": "bpe:400"}, {"val_fraction": 0.3}, {"split_seed": 4}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.*shards was prepared with"):
            prepare(data_config(shards, **wrong))
    with pytest.raises(ValueError, match="stands alone"):
        prepare(data_config(shards, tmp_path))
    with pytest.raises(ValueError, match="prepared already"):
        prepare(data_config(shards), out=tmp_path / "again")
    damage_shard(shards / "val.shard")
    with pytest.raises(ValueError, match=r"val\.shard is damaged"):
        prepare(data_config(shards))
    for name in ("train.shard", "tokenizer.json"):
        (shards / name).rename(tmp_path / name)
        with pytest.raises(FileNotFoundError, match=name):
            prepare(data_config(shards))
        (tmp_path / name).rename(shards / name)
