from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders import damage_shard, data_config
from filelock import FileLock

from spheret.data import ShardWriter, prepare


def leftover(path: Path, name: str = "train.shard") -> Path:
    path.mkdir(parents=True)
    (path / name).write_text("half")
    os.utime(path, (time.time() - 10**6,) * 2)
    return path


def test_old_leftovers_are_removed(corpus: Path, cache: Path) -> None:
    old = leftover(cache / ".0123456789abcdef.abc.tmp")
    locked = leftover(cache / ".0123456789abcdef.xyz.tmp", ".lock")
    half = leftover(cache / ".0123456789abcdef.def.tmp", ".train.shard.0123456789ab.tmp")
    new = cache / ".4567456745674567.abc.tmp"
    new.mkdir()
    prepare(data_config(corpus))
    assert not old.exists() and not locked.exists() and not half.exists() and new.exists()


@pytest.mark.parametrize("name", [".mine.tmp", ".0123456789abcdef.abc.tmp", ".rsync.0123.tmp"])
def test_other_programs_temporary_folders_are_kept(corpus: Path, tmp_path: Path, name: str) -> None:
    """``--out`` writes into a folder of the user's, which may hold anything."""
    work = tmp_path / "work"
    mine, inside = leftover(work / name, "thesis.txt"), leftover(work / "full" / name, "thesis.txt")
    prepare(data_config(corpus), out=work / "shards")
    with pytest.raises(FileExistsError, match="full holds something else"):
        prepare(data_config(corpus), out=work / "full")
    assert (mine / "thesis.txt").exists() and (inside / "thesis.txt").exists()


def test_a_fresh_disk_is_an_empty_folder(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "disk" / "lost+found").mkdir(parents=True)
    for _ in range(2):
        prepare(data_config(corpus), out=tmp_path / "disk").verify()
        damage_shard(tmp_path / "disk" / "train.shard")
    assert (tmp_path / "disk" / "lost+found").is_dir()


@pytest.mark.parametrize("error", [NotImplementedError("no flock"), OSError(errno.ENOLCK, "No locks available")])
def test_a_file_system_without_locks(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def acquire(lock: FileLock, **_: object) -> None:
        raise error

    monkeypatch.setattr(FileLock, "acquire", acquire)
    leftover(tmp_path / ".0123456789abcdef.abc.tmp")
    prepare(data_config(corpus), out=tmp_path / "out").verify()


def test_an_error_of_a_library_is_no_fault_of_the_cache(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def documents(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr("spheret.data.sources.Source.documents", documents)
    with pytest.raises(RuntimeError, match="a fault"):  # without a warning, which would be an error here
        prepare(data_config(corpus))


def test_out_is_written_once_and_kept(corpus: Path, tmp_path: Path, cache: Path) -> None:
    out = tmp_path / "deep" / "out"
    first = prepare(data_config(corpus), out=out)
    assert first.path == out and not cache.exists()
    before = (out / "train.shard").stat().st_mtime_ns
    assert prepare(data_config(corpus), out=out).fingerprint == first.fingerprint
    assert (out / "train.shard").stat().st_mtime_ns == before
    with pytest.raises(FileExistsError, match=f"{first.fingerprint}.*new folder"):
        prepare(data_config(corpus, split_seed=1), out=out)
    damage_shard(out / "train.shard")
    (out / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"notes\.txt"):
        prepare(data_config(corpus), out=out)
    (out / "notes.txt").unlink()
    prepare(data_config(corpus), out=out).verify()


def test_out_never_overwrites_anything_else(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    prepare(data_config(corpus), out=tmp_path / "mine").verify()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    for name in ("thesis", "file"):
        with pytest.raises(FileExistsError, match=f"{name} holds something else"):
            prepare(data_config(corpus), out=tmp_path / name)
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
    settings = data_config(corpus)
    finished: list[int] = []

    def meanwhile(line: str) -> None:
        if not finished:
            finished.append(prepare(settings).train.path.stat().st_ino)

    late = prepare(settings, progress=meanwhile)
    assert late.train.path.stat().st_ino == finished[0]
    assert [entry.name for entry in cache.iterdir()] == [late.fingerprint]


def test_out_may_be_a_link_or_the_current_folder(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, link, here = tmp_path / "disk", tmp_path / "link", tmp_path / "here"
    disk.mkdir()
    here.mkdir()
    link.symlink_to(disk)
    prepare(data_config(corpus), out=link).verify()
    assert link.is_symlink() and sorted(path.name for path in disk.iterdir()) == [
        "manifest.json", "train.shard", "val.shard"
    ]  # fmt: skip
    damage_shard(disk / "train.shard")
    prepare(data_config(corpus), out=link).verify()
    assert link.is_symlink()
    monkeypatch.chdir(here)
    prepare(data_config(corpus), out=".").verify()
    (tmp_path / "later").symlink_to(tmp_path / "made")
    prepare(data_config(corpus), out=tmp_path / "later").verify()
    assert (tmp_path / "made").is_dir() and (tmp_path / "later").is_symlink()


def test_a_preparation_at_work_is_not_swept_away(corpus: Path, cache: Path) -> None:
    """However old its folder looks: a corpus may take days."""

    def meanwhile(line: str) -> None:
        if line.startswith("reading"):
            (mine,) = cache.iterdir()
            os.utime(mine, (0, 0))
            prepare(data_config(corpus, split_seed=1))

    prepare(data_config(corpus), progress=meanwhile).verify()
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("how", ["a file", "no home", "full"])
def test_a_cache_that_cannot_be_used_is_replaced(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    reason = "cannot write to .*file"
    if how == "a file":
        (tmp_path / "file").touch()
        monkeypatch.setenv("SPHERET_CACHE", str(tmp_path / "file"))
    elif how == "no home":
        monkeypatch.delenv("SPHERET_CACHE")
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
        reason = "home"
    else:
        full = Path("/dev/full")
        if not full.exists():
            pytest.skip("no /dev/full")
        writes = ShardWriter.__enter__

        def enter(writer: ShardWriter) -> ShardWriter:
            """A shard on a full disk, in the cache alone."""
            if str(tmp_path / "cache") not in str(writer.path):
                return writes(writer)
            writer._temporary.symlink_to(full)
            return writes(writer)

        monkeypatch.setattr(ShardWriter, "__enter__", enter)
        reason = "no space left in .*cache"
    with pytest.warns(UserWarning, match=f"no cache for prepared data.*{reason}"):
        dataset = prepare(data_config(corpus))
    dataset.verify()
    assert (tmp_path / "tmp") in dataset.path.parents


def test_a_full_disk_names_the_folder(corpus: Path, tmp_path: Path) -> None:
    """In a process whose files may have 4 KiB: the same path through the code, with another number."""
    code = (
        "import errno, resource, signal, sys; from spheret.data import DataConfig, prepare, cache\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); cache._NO_SPACE = (errno.EFBIG,)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))\n"
        "prepare(DataConfig(data=(sys.argv[1],)), out=sys.argv[2])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(corpus), str(tmp_path / "out")], capture_output=True, text=True
    )
    assert done.returncode == 1 and "OSError: no space left in" in done.stderr and "another --out" in done.stderr
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*.tmp"))
