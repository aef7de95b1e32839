from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spheret.data.sources import read_documents, resolve
from spheret.data.sources.stdlib import stdlib_files
from spheret.data.sources.text import read_text

AWKWARD = "NUL \0, emoji \U0001f600, CRLF\r\n\r\nempty lines\n\n\n\ttab é 漢字 <|endoftext|>"


def read(path: Path, column: str = "text") -> list[str]:
    return list(read_documents(path, column))


def jsonl(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize("suffix", [".txt", ".md", ".py", ".TXT"])
def test_a_text_file_is_one_unchanged_document(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(AWKWARD.encode())
    assert read(path) == [AWKWARD]


@pytest.mark.parametrize(("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_jsonl_rows_are_documents(tmp_path: Path, suffix: str, compress: object) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    rows = jsonl({"text": AWKWARD}, {"text": ""}, {"text": None}) + b"\n" + jsonl({"text": "b", "id": 1})
    path.write_bytes(compress(rows))  # type: ignore[operator]
    assert read(path) == [AWKWARD, "b"]


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [AWKWARD, None, "", *(f"row {i}" for i in range(600))]
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        pq.write_table(
            pa.table({"id": range(603), "body": pa.array(texts, pa.string()).cast(kind)}), tmp_path / "a.parquet"
        )
        assert read(tmp_path / "a.parquet", "body") == [text for text in texts if text]


@given(st.text(alphabet="ab\n\r é漢😀\0", min_size=1), st.integers(8, 20))
def test_large_text_files_come_in_bounded_documents(
    tmp_path_factory: pytest.TempPathFactory, text: str, limit: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "large.txt"
    path.write_bytes(text.encode())
    parts = list(read_text(path, 0, limit))
    assert "".join(parts) == text
    assert all(len(part.encode()) <= limit for part in parts)


def test_parts_of_a_large_file_end_with_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\nfour\n")
    assert list(read_text(tmp_path / "a.txt", 18, 10)) == ["one\ntwo\n", "three\n", "four\n"]
    assert list(read_text(tmp_path / "a.txt", 19, 10)) == ["one\ntwo\nthree\nfour\n"]


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert read(tmp_path / "a.txt") == ["hello"]


@pytest.mark.parametrize("prefix", [b"", b"\xef\xbb\xbf"])
def test_wrong_encoding_names_file_and_position(tmp_path: Path, prefix: bytes) -> None:
    (tmp_path / "latin.txt").write_bytes(prefix + "caf\u00e9 au lait".encode("latin-1"))
    with pytest.raises(ValueError, match=rf"latin\.txt.*0xe9 at position {3 + len(prefix)};.*iconv"):
        read(tmp_path / "latin.txt")


def test_wrong_encoding_far_into_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"0123456\n" * 5 + b"ab\xff")
    with pytest.raises(ValueError, match="position 42"):
        list(read_text(tmp_path / "a.txt", 20, 16))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (b"{'text': 'single quotes'}", "line 2: not JSON"),
        (b'{"text": "cut of', "line 2: not JSON"),
        (b'["text"]', "line 2: a list, not an object"),
        (b'{"body": "x", "id": 3}', r"line 2: no column 'text'; the columns are \['body', 'id'\].*text_column"),
        (b'{"text": 7}', "line 2: column 'text' holds a int"),
        (b'{"text": "caf\xe9"}', "line 2: byte 13 is not UTF-8"),
        (b'{"text": "\\ud800"}', "line 2: half of a surrogate pair at character 0"),
    ],
)
def test_bad_json_lines_are_named(tmp_path: Path, line: bytes, named: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(jsonl({"text": "good"}) + line + b"\n")
    with pytest.raises(ValueError, match=rf"rows\.jsonl, {named}"):
        read(path)


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_broken_archives_are_named(tmp_path: Path, suffix: str, compress: object) -> None:
    path = tmp_path / f"rows.jsonl{suffix}"
    whole = compress(jsonl(*({"text": f"row {i} {i * i}"} for i in range(500))))  # type: ignore[operator]
    for broken in (whole[:-20], b"plain text", whole[:50] + b"\xff\xff\xff" + whole[53:]):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"rows\.jsonl"):
            read(path)


def test_parquet_errors_are_named(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), path)
    with pytest.raises(
        ValueError, match=r"a\.parquet: no column 'text'; the columns are \['body', 'id'\].*text_column"
    ):
        read(path)
    with pytest.raises(ValueError, match="column 'id' holds int64"):
        read(path, "id")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"a\.parquet is not a readable Parquet file"):
        read(path)


def test_a_file_without_text_is_an_error(tmp_path: Path) -> None:
    for name, content in (("a.txt", b""), ("b.jsonl", b""), ("c.jsonl", b'{"text": ""}\n'), ("d.txt", b"\xef\xbb\xbf")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            [list(source.documents("text")) for source in resolve([str(tmp_path / name)])]


def test_unknown_and_missing_paths_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.docx").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"a\.docx.*'\.docx'.*\.parquet"):
        resolve([str(tmp_path / "a.docx")])
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt.*stdlib"):
        resolve([str(tmp_path / "nowhere.txt")])
    with pytest.raises(FileNotFoundError, match=r"fineweb-edu.*parquet"):
        resolve(["fineweb-edu"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty holds no file.*\.jsonl"):
        resolve([str(tmp_path / "empty")])


def test_a_folder_is_its_readable_files_in_order(tmp_path: Path) -> None:
    for name in ("b/z.txt", "b/a.md", "a.py", ".hidden/x.txt", "image.png", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.txt").touch()
    (source,) = resolve([str(tmp_path)])
    assert list(source.documents("text")) == ["a.py", "b/a.md", "b/z.txt", "c.txt"]
    assert source.name == tmp_path.name


def test_readme_and_scripts_beside_data_files_are_not_corpus(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "load.py").write_text("code")
    (tmp_path / "rows.jsonl").write_bytes(jsonl({"text": "row"}))
    (tmp_path / "more.txt").write_text("more")
    (source,) = resolve([str(tmp_path)])
    assert list(source.documents("text")) == ["more", "row"]


def test_description_follows_contents_not_names(tmp_path: Path) -> None:
    for name, text in (("a.txt", "same"), ("b.txt", "same"), ("c.txt", "other"), ("d.jsonl", "same")):
        (tmp_path / name).write_text(text)
    digest = {p.name: s.describe()["sha256"] for p in tmp_path.iterdir() for s in resolve([str(p)])}
    assert digest["a.txt"] == digest["b.txt"]
    assert len({digest["a.txt"], digest["c.txt"], digest["d.jsonl"]}) == 3


def test_stdlib_is_source_without_tests() -> None:
    files = stdlib_files()
    sizes = sum(path.stat().st_size for path in files)
    assert 5e6 < sizes < 20e6
    names = {path.name for path in files}
    assert {"argparse.py", "ast.py"} <= names
    folders = {part for path in files for part in path.parts[-3:-1]}
    assert not folders & {"test", "tests", "site-packages", "__pycache__"}


def test_stdlib_rules(tmp_path: Path) -> None:
    kept = {"b.py": "b = 1\n", "a/c.py": "c = 1\n"}
    dropped = {"copy.py": "b = 1\n", "test/t.py": "t", "a/tests/t.py": "t2", "site-packages/p.py": "p", "empty.py": ""}
    for name, text in {**kept, **dropped, "notes.txt": "n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    assert [path.relative_to(tmp_path).as_posix() for path in stdlib_files(tmp_path)] == ["a/c.py", "b.py"]
    with pytest.raises(FileNotFoundError, match="no Python source"):
        stdlib_files(tmp_path / "a" / "nothing")
