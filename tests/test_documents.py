"""Reading documents: exact bytes, one order, every bad line named, no file read in part."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from pipeline.config.tokenize import DataSource
from pipeline.errors import UserError
from pipeline.lm.documents import Part, ReadCounts, _read_dataset, hub_revision, read_part
from pipeline.lm.sources import find_files, format_of, list_inputs

LINES = [json.dumps({"text": f"line {number}"}).encode() + b"\n" for number in range(2000)]


def zstd(data: bytes) -> bytes:
    return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


def documents(source: DataSource, counts: ReadCounts | None = None) -> list[bytes]:
    """Read every document of a source, whole files at a time."""
    counts = counts or ReadCounts()
    parts = [Part(item.source, item.path) for item in list_inputs([source])]
    return [text for part in parts for text in read_part(part, [source], counts)]


def texts(path: Path | str, **source: str) -> list[bytes]:
    return documents(DataSource(path=str(path), **source))


def read(path: Path | str, **source: str) -> tuple[list[bytes], ReadCounts]:
    counts = ReadCounts()
    return documents(DataSource(path=str(path), **source), counts), counts


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


# -- what is found ----------------------------------------------------------------------------------------------------


def test_a_folder_is_read_in_sorted_order_without_code_and_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "B.txt", "code.py", ".hidden.txt", ".git/x.txt", "notes.pdf", "x.py.txt"):
        write(tmp_path / name, name.encode())
    assert texts(tmp_path) == [b"B.txt", b"a/z.md", b"b.txt", b"x.py.txt"]


def test_globs_are_recursive_and_may_name_code(tmp_path: Path) -> None:
    for name in ("a.py", "d/b.py", "d/c.txt"):
        write(tmp_path / name, name.encode())
    assert texts(tmp_path / "**" / "*.py") == [b"a.py", b"d/b.py"]
    assert texts(tmp_path / "a.py") == [b"a.py"]


def test_links_to_folders_are_followed_and_loops_end(tmp_path: Path) -> None:
    write(tmp_path / "far" / "a.txt", b"a")
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "link").symlink_to(tmp_path / "far")
    (tmp_path / "near" / "loop").symlink_to(tmp_path / "near")
    assert texts(tmp_path / "near") == [b"a"]


def test_the_standard_library_without_its_tests() -> None:
    files = find_files("python-stdlib")
    names = {file.name for file in files}
    assert {"argparse.py", "this.py"} <= names
    assert not any({"test", "tests", "site-packages", "dist-packages", "idle_test"} & set(file.parts) for file in files)
    assert files == sorted(files, key=str)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none/*.jsonl", "0 files of a known kind"),
        ("missing.txt", "no such file or folder"),
        ("book.pdf", r"unknown kind of file. Known: .txt, .md, .py, .jsonl, .parquet; .*\.gz or \.zst"),
        ("*.pdf", "1 files match"),
        ("empty", "0 files of a known kind"),
    ],
)
def test_what_holds_nothing_is_named(tmp_path: Path, name: str, message: str) -> None:
    write(tmp_path / "book.pdf", b"%PDF")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=message):
        texts(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.TXT", ("text", None)), ("a.b.jsonl.gz", ("lines", "gzip")), ("a.jsonl.zst", ("lines", "zstd"))],
)
def test_the_suffix_says_the_kind(name: str, kind: tuple[str, str | None]) -> None:
    assert format_of(Path(name)) == kind


# -- text files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [b"a\r\nb\rc\n", b"\xef\xbb\xbfbom", b"a\0b", "▁\u200b\u202eشكرا\U0001f600".encode(), b"no line end", b"  \tx  "],
)
def test_a_text_file_is_one_document_byte_for_byte(tmp_path: Path, text: bytes) -> None:
    assert texts(write(tmp_path / "a.txt", text)) == [text]


def test_invalid_utf8_is_counted_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"abc\xff")
    found, counts = read(path)
    assert (found, counts.malformed) == ([], 1)
    assert counts.places == [f"{path}: invalid UTF-8 at byte 3"]


def test_empty_and_blank_files_are_empty_documents(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", b"")
    write(tmp_path / "b.txt", b"\n" * 1000)
    found, counts = read(tmp_path)
    assert (found, counts.empty, counts.documents) == ([], 2, 0)
    assert counts.empty_files == [str(tmp_path / "a.txt")]


# -- JSON lines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[1]", "not an object but a list"),
        (b"3", "not an object but a number"),
        (b'"text"', "not an object but a string"),
        (b'{"text": null}', "field 'text' is null, not text"),
        (b'{"text": 5}', "field 'text' is a number, not text"),
        (b'{"text": {}}', "field 'text' is an object, not text"),
        (b'{"content": "x", "id": 1}', r"no field 'text' \(fields: content, id\)"),
        (b'{"text": "a"}{"text": "b"}', "not JSON: Extra data at column 14"),
        (b'{"text": "a', "not JSON"),
        (b'{"text": "a", "n": NaN}', "not JSON: NaN"),
        (b'{"text": "\\ud800"}', "field 'text' holds a lone surrogate at character 0"),
        (b'{"text": "\xff"}', "invalid UTF-8 at byte 10 of the line"),
        (b'{"text": "a", "deep": ' + b"[" * 100_000, "not readable: nested too deeply"),
    ],
)
def test_a_malformed_line_is_counted_and_named(tmp_path: Path, line: bytes, reason: str) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "good"}\n' + line + b'\n{"text": "better"}\n')
    found, counts = read(path)
    assert found == [b"good", b"better"]
    assert (counts.records, counts.malformed) == (3, 1)
    with pytest.raises(UserError, match=rf"(?s)1 of 3 .*33\.333%.*tokenize\.max_malformed_share.*a\.jsonl:2: {reason}"):
        counts.check_malformed(0.3)
    counts.check_malformed(0.34)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"text": "a\u2028b"}'.encode(), "a\u2028b".encode()),
        (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", b"a"),
        (b'{"text": "\\ud83d\\ude00"}', "\U0001f600".encode()),
        (b'\xef\xbb\xbf{"text": "bom"}', b"bom"),
        (b'{"text": "a\\r\\nb"}\r', b"a\r\nb"),
        (b'{"text": "' + b"x" * 10_000_000 + b'"}', b"x" * 10_000_000),
    ],
)
def test_what_is_valid_json_is_read(tmp_path: Path, line: bytes, text: bytes) -> None:
    assert texts(write(tmp_path / "a.jsonl", line)) == [text]


def test_blank_lines_are_no_records(tmp_path: Path) -> None:
    found, counts = read(write(tmp_path / "a.jsonl", b'\n  \n{"text": "a"}\n\n{"text": ""}\n'))
    assert (found, counts.blank_lines, counts.records, counts.empty) == ([b"a"], 3, 2, 1)


def test_only_the_first_places_are_kept(tmp_path: Path) -> None:
    _, counts = read(write(tmp_path / "a.jsonl", b"x\n" * 100))
    assert (counts.malformed, len(counts.places)) == (100, 20)
    with pytest.raises(UserError, match="and 80 more"):
        counts.check_malformed(0.5)


def test_another_field(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "a.jsonl", b'{"content": "x"}'), text_field="content") == [b"x"]


# -- compressed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".zst", zstd)])
def test_all_members_and_frames_are_read(tmp_path: Path, suffix: str, compress: type[bytes]) -> None:
    data = compress(b"".join(LINES[:1000])) + compress(b"".join(LINES[1000:]))
    assert len(texts(write(tmp_path / f"a.jsonl{suffix}", data))) == 2000


@pytest.mark.parametrize("cut", [1, 9, 40])
@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".zst", zstd)])
def test_a_cut_file_is_an_error(tmp_path: Path, suffix: str, compress: type[bytes], cut: int) -> None:
    data = compress(b"".join(LINES[:1000])) + compress(b"".join(LINES[1000:]))
    with pytest.raises(UserError, match=rf"a\.jsonl{suffix}: can't be read to its end"):
        texts(write(tmp_path / f"a.jsonl{suffix}", data[:-cut]))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("plain.jsonl.gz", LINES[0], "can't be read to its end"),
        ("plain.jsonl.zst", LINES[0], "can't be read to its end"),
        (
            "twice.jsonl.gz",
            gzip.compress(gzip.compress(LINES[0], mtime=0), mtime=0),
            "inside it is compressed once more",
        ),
        ("gzip.jsonl", gzip.compress(LINES[0], mtime=0), r"it is compressed \(gzip\)"),
        ("zstd.txt", zstd(LINES[0]), r"it is compressed \(zstd\)"),
        ("empty.jsonl.gz", b"", "0 bytes"),
        ("empty.jsonl.zst", b"", "0 bytes"),
        ("empty.parquet", b"", "0 bytes"),
        ("broken.parquet", b"PAR1" * 20, "can't be read"),
    ],
)
def test_a_file_that_is_not_what_its_suffix_says(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    with pytest.raises(UserError, match=f"{name}: {message}"):
        texts(write(tmp_path / name, data))


# -- parquet and datasets ---------------------------------------------------------------------------------------------


def test_parquet_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "", "d"], "n": [1, 2, 3, 4]}), path)
    found, counts = read(path)
    assert (found, counts.records, counts.empty) == ([b"a", b"d"], 4, 1)
    assert counts.places == [f"{path}:2: field 'text' is null, not text"]
    with pytest.raises(UserError, match=r"a\.parquet: no column 'body' \(columns: text, n\)"):
        texts(path, text_field="body")


def test_a_dataset_folder_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    write(folder / "train.jsonl", b'{"text": "a"}\n{"text": "b"}\n')
    assert documents(DataSource(dataset=str(folder))) == [b"a", b"b"]
    with pytest.raises(UserError, match=r"set\[test\]: "):
        documents(DataSource(dataset=str(folder), split="test"))


def test_reading_text_imports_neither_torch_nor_datasets() -> None:
    program = "import sys, pipeline.stages.tokenize; print({'torch', 'datasets', 'pyarrow'} & set(sys.modules))"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "set()"


def test_a_dataset_is_read_at_the_revision_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def load_dataset(name: str, config: str | None, **words: object) -> list[dict[str, str]]:
        asked.append(words)
        return [{"text": "one"}]

    class HfApi:
        def dataset_info(self, name: str, revision: str | None) -> SimpleNamespace:
            if name == "gone/away":
                raise OSError("no network")
            return SimpleNamespace(sha=f"commit of {revision or 'today'}")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=HfApi))
    source = DataSource(dataset="owner/name", revision="v1")
    assert list(_read_dataset(source, ReadCounts())) == [b"one"]
    assert asked[0]["revision"] == "v1"
    names = {"v1": source, "today": DataSource(dataset="owner/name")}
    assert {name: hub_revision(one) for name, one in names.items()} == {
        "v1": "commit of v1",
        "today": "commit of today",
    }
    assert hub_revision(DataSource(dataset="gone/away")) is None
