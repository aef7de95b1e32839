from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spheret.data.sources import Census, read_documents, resolve
from spheret.data.sources.stdlib import stdlib_files
from spheret.data.sources.text import read_text

AWKWARD = "NUL \0, emoji \U0001f600, CRLF\r\n\r\nempty lines\n\n\n\ttab é 漢字 <|endoftext|>"


def read(path: Path, column: str = "text") -> list[str]:
    """The texts of the rows that hold any."""
    return list(filter(None, read_documents(path, column)))


def jsonl(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize("suffix", [".txt", ".md", ".py", ".TXT"])
def test_a_text_file_is_one_unchanged_document(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(AWKWARD.encode())
    assert read(path) == [AWKWARD]


def zstd(raw: bytes) -> bytes:
    pa = pytest.importorskip("pyarrow")
    half = len(raw) // 2  # two frames, as tools that compress in parallel write them
    return b"".join(bytes(pa.compress(part, "zstd", asbytes=True)) for part in (raw[:half], raw[half:]))


COMPRESSED = [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress), (".zst", zstd)]


@pytest.mark.parametrize(("suffix", "compress"), COMPRESSED)
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


@pytest.mark.parametrize(
    ("codec", "named"),
    [
        ("utf-16", "UTF-16"),
        ("utf-16-le", "UTF-16LE"),
        ("utf-16-be", "UTF-16BE"),
        ("utf-32", "UTF-32"),
        ("utf-32-le", "UTF-32LE"),
        ("utf-32-be", "UTF-32BE"),
    ],
)
def test_utf_16_is_named_with_and_without_its_mark(tmp_path: Path, codec: str, named: str) -> None:
    (tmp_path / "wide.txt").write_bytes("caf\u00e9 au lait, and more of it".encode(codec))
    with pytest.raises(ValueError, match=rf"wide\.txt looks like {named}, .*iconv -f {named} -t UTF-8 wide\.txt"):
        read(tmp_path / "wide.txt")


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize(
    "text",
    [
        "Все счастливые семьи похожи друг на друга",  # noqa: RUF001
        "Όλες οι ευτυχισμένες οικογένειες μοιάζουν",  # noqa: RUF001
        "सभी सुखी परिवार एक जैसे होते हैं",
        "ทุกครอบครัวที่มีความสุข ล้วนเหมือนกัน",
        "所有幸福的家庭都相似,每个不幸的家庭各有各的不幸。",
        "幸福な家庭はすべて互いに似かよったものである、\n",
        "행복한 가정은 모두 비슷하다\n",
    ],
)
def test_utf_16_of_any_script_is_named(tmp_path: Path, text: str, codec: str) -> None:
    """Some of it is valid UTF-8: in Russian, every byte is below 0x80."""
    (tmp_path / "wide.txt").write_bytes((text * 4).encode(codec))
    encoding = codec.upper().replace("-LE", "LE").replace("-BE", "BE")
    with pytest.raises(ValueError, match=rf"wide\.txt .*iconv -f {encoding} -t UTF-8 wide\.txt"):
        read(tmp_path / "wide.txt")


@pytest.mark.parametrize(
    "text",
    ["1\n0\n" * 20, "\n" * 40, "\t1" * 40, "a\0b\0\n", "\0" * 6, "é\n" * 20, "说。\n" * 20],
)
def test_short_lines_and_control_characters_are_utf_8(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text, newline="")
    assert read(tmp_path / "a.txt") == [text]


@pytest.mark.parametrize(
    "text", ["Toutes les familles heureuses se ressemblent, dit Tolstoï à Léon.\n" * 9, "é à\r\n" * 9]
)
def test_latin_1_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="iconv -f LATIN1"):
        read(tmp_path / "a.txt")


def test_a_large_file_is_cut_at_separators(tmp_path: Path) -> None:
    """One without line ends, too, and never inside a separator."""
    for end in ("", "\n"):
        stories = [f"story {i} {'of length ' * (i % 7)}{end}" for i in range(200)]
        (tmp_path / "a.txt").write_text("<|endoftext|>".join(stories))
        parts = list(read_text(tmp_path / "a.txt", 300, 150))
        assert [text for part in parts for text in part.split("<|endoftext|>") if text] == stories
    for before in range(130, 160):  # the separator lies across the end of the first part
        (tmp_path / "a.txt").write_text(f"{'x' * before}<|endoftext|>{'y' * 200}")
        texts = [text for part in read_text(tmp_path / "a.txt", 300, 150) for text in part.split("<|endoftext|>")]
        assert not any(set(text) - set("xy") for text in texts)


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
        (b'{"text": "a", "n": ' + b"7" * 5000 + b"}", "line 2: Exceeds the limit.*write that number as text"),
        (b'{"text": "a", "n": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "line 2: JSON that is nested too deeply"),
        ('{"text": "a"}'.encode("utf-16"), "line 2: byte 0 is not UTF-8 but UTF-16: iconv -f UTF-16 -t UTF-8"),
        ('{"text": "a"}'.encode("utf-16-le"), "line 2: not UTF-8 but UTF-16LE: iconv -f UTF-16LE"),
    ],
)
def test_bad_json_lines_are_named(tmp_path: Path, line: bytes, named: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(jsonl({"text": "good"}) + line + b"\n")
    with pytest.raises(ValueError, match=rf"rows\.jsonl, {named}"):
        read(path)


@pytest.mark.parametrize(("suffix", "compress"), COMPRESSED)
def test_compressed_text_is_read_as_its_text(tmp_path: Path, suffix: str, compress: object) -> None:
    lines = "".join(f"line {i} é\n" for i in range(400))
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(compress(lines.encode()))  # type: ignore[operator]
    assert read(path) == [lines]
    parts = list(read_text(path, 100, 50))
    assert "".join(parts) == lines and all(len(part.encode()) <= 50 for part in parts)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_json_file_is_an_array_or_an_object_or_lines(tmp_path: Path, suffix: str, indent: int | None) -> None:
    path = tmp_path / f"a{suffix}"
    rows = [{"text": AWKWARD, "id": 10**400}, {"text": None}, {"text": "b"}]
    pack = gzip.compress if suffix.endswith(".gz") else bytes
    for content in (json.dumps(rows, indent=indent), "\n".join(map(json.dumps, rows))):
        path.write_bytes(pack(content.encode()))
        assert list(read_documents(path, "text")) == [AWKWARD, "", "b"]
    path.write_bytes(pack(json.dumps(rows[0], indent=indent).encode()))
    assert read(path) == [AWKWARD]
    path.write_bytes(pack(json.dumps([*rows, 7], indent=indent).encode()))
    with pytest.raises(ValueError, match=r"a\.json.*row 4: a int, not an object"):
        read(path)


@pytest.mark.parametrize(("suffix", "compress"), COMPRESSED[1:])
def test_broken_archives_are_named(tmp_path: Path, suffix: str, compress: object) -> None:
    path = tmp_path / f"rows.jsonl{suffix}"
    whole = compress(jsonl(*({"text": f"row {i} {i * i}"} for i in range(500))))  # type: ignore[operator]
    flipped = whole[:50] + b"\xff\xff\xff" + whole[53:]
    # pyarrow writes zstd without the checksum that the zstd command writes, so nothing could notice.
    for broken in (whole[:-20], b"plain text", *([] if suffix == ".zst" else [flipped])):
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
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match=r"a\.parquet is not a readable Parquet file"):
        read(path)
    pq.write_table(pa.table([["x"], ["y"]], names=["text", "text"]), path)
    with pytest.raises(ValueError, match=r"a\.parquet has 2 columns named 'text': rename"):
        read(path)


@pytest.mark.parametrize("codec", ["zstd", "gzip", "snappy"])
def test_a_damaged_parquet_page_is_named(tmp_path: Path, codec: str) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    rows = [f"row {i} {i * i}" for i in range(2000)]
    pq.write_table(pa.table({"text": rows}), path, compression=codec, use_dictionary=False)
    raw = bytearray(path.read_bytes())
    raw[2000:4000] = bytes(2000)
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"a\.parquet is not a readable Parquet file"):
        read(path)


def test_unknown_and_missing_paths_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.docx").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"a\.docx.*'\.docx'.*\.parquet"):
        resolve([str(tmp_path / "a.docx")])
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt.*stdlib"):
        resolve([str(tmp_path / "nowhere.txt")])
    with pytest.raises(FileNotFoundError, match=r"fineweb-edu.*parquet"):
        resolve(["fineweb-edu"])
    with pytest.raises(ValueError, match=r"a\.parquet\.gz: unknown kind"):
        resolve([str((tmp_path / "a.docx").rename(tmp_path / "a.parquet.gz"))])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty holds no file.*\.jsonl"):
        resolve([str(tmp_path / "empty")])


def test_a_folder_is_its_readable_files_in_order(tmp_path: Path) -> None:
    for name in ("b/z.txt", "b/a.md", "a.py", ".hidden/x.txt", "image.png", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "loop").symlink_to(tmp_path)
    (source,) = resolve([str(tmp_path)])
    assert list(source.documents("text")) == ["a.py", "b/a.md", "b/z.txt", "c.txt"]
    assert source.name == tmp_path.name
    left_out = "empty.txt (empty), image.png (unknown kind), loop (a link to a folder)"
    assert source.notice() == f"{tmp_path.name} leaves out 3 entries: {left_out}"


def test_every_readable_file_of_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl({"text": "a"}))
    (tmp_path / "b.jsonl.zst").write_bytes(zstd(jsonl({"text": "b"})))
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(json.dumps([{"text": "c"}]).encode()))
    (tmp_path / "d.txt.bz2").write_bytes(bz2.compress(b"d"))
    (tmp_path / "settings.json").write_text('{"format": 1}')
    (tmp_path / "e.csv").write_text("text\ne\n")
    (source,) = resolve([str(tmp_path)])
    assert list(source.documents("text")) == ["a", "b", "c", "d"]
    assert str(source.notice()).endswith("2 entries: e.csv (unknown kind), settings.json (no rows with 'text')")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("b.json", b'[{"text": "x"}, {"text": "y"'),
        ("b.json", '[{"text": "x"}]'.encode("utf-16")),
        ("b.json.gz", gzip.compress(json.dumps([{"text": f"row {i}"} for i in range(999)]).encode())[:-40]),
    ],
)
def test_a_damaged_json_file_in_a_folder_stops(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl({"text": "a"}))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"b\.json{'.*decompressed' if 'gz' in name else ''}"):
        list(resolve([str(tmp_path)])[0].documents("text"))


@pytest.mark.parametrize("content", ['{"a": 1, // a comment\n}', '{"style": {"text": 3}}', '[{"text": 3}]', '"text"'])
def test_settings_in_a_folder_are_left_out(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "settings.json").write_text(content)
    (source,) = resolve([str(tmp_path)])
    assert source.left_out == (("settings.json", "no rows with 'text'"),)


def test_many_files_left_out_are_counted(tmp_path: Path) -> None:
    for i in range(9):
        (tmp_path / f"{i}.pdf").touch()
    with pytest.raises(FileNotFoundError, match=r"no file with text; it holds 0\.pdf .*4\.pdf .* and 4 more"):
        resolve([str(tmp_path)])


def test_what_this_package_wrote_is_no_corpus(tmp_path: Path) -> None:
    for name in ("run/config.json", "run/metrics.jsonl", "all/results.json", "all/runs/x/metrics.jsonl",
                 "shards/manifest.json", "shards/train.shard", "text/a.txt"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}')
    (source,) = resolve([str(tmp_path)])
    assert [path.name for path in source.files] == ["a.txt"]
    assert str(source.notice()).endswith("all (a comparison), run (a run), shards (prepared data)")


def test_rows_and_files_without_text_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl({"text": "a"}, {"text": ""}, {"text": None}))
    (tmp_path / "b.jsonl").write_bytes(jsonl({"text": None}))
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"text": [None, None]}), tmp_path / "c.parquet")
    (tmp_path / "d.txt").write_bytes(b"\xef\xbb\xbf")
    census = Census()
    (source,) = resolve([str(tmp_path)])
    assert list(source.documents("text", census)) == ["a"]
    assert (census.rows, census.empty_rows) == (6, 5)
    assert census.empty_files == ["b.jsonl", "c.parquet", "d.txt"]


def test_separators_inside_a_text_divide_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n<|endoftext|>\n two<|endoftext|><|endoftext|>\n")
    (source,) = resolve([str(tmp_path / "a.txt")])
    census = Census()
    assert list(source.documents("text", census)) == ["one\n", "\n two"]
    assert census.separators == 3


def test_readme_and_scripts_beside_data_files_are_not_corpus(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "load.py").write_text("code")
    (tmp_path / "rows.jsonl").write_bytes(jsonl({"text": "row"}))
    (tmp_path / "more.txt").write_text("more")
    (source,) = resolve([str(tmp_path)])
    assert list(source.documents("text")) == ["more", "row"]
    assert str(source.notice()).endswith("README.md (beside data files), load.py (beside data files)")


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
