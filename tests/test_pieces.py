"""Pieces of work: no document is lost or read twice wherever the input is cut, and the cuts depend on the input alone."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.tokenize import DataSource
from pipeline.errors import NotReadyError, UserError
from pipeline.lm import documents, pieces
from pipeline.lm.documents import Part, ReadCounts, read_part
from pipeline.lm.pieces import cut_input, read_pieces
from pipeline.lm.sources import list_inputs


def read(parts: list[Part], sources: list[DataSource]) -> tuple[list[bytes], ReadCounts]:
    counts = ReadCounts()
    return [text for part in parts for text in read_part(part, sources, counts)], counts


LINES = st.lists(st.sampled_from([b"", b"   ", b"x", b'{"text": "a"}', b'{"text": "longer text"}', b'{"text": ""}']))


@settings(max_examples=60, deadline=None)
@given(lines=LINES, last=st.sampled_from([b"", b"\n"]), cuts=st.lists(st.integers(0, 200), max_size=5))
def test_wherever_a_file_of_lines_is_cut_all_of_it_is_read_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], last: bytes, cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    path.write_bytes(b"\n".join(lines) + last)
    size = path.stat().st_size
    places = sorted({0, size, *(cut for cut in cuts if cut < size)})
    parts = [Part(0, path, start, end) for start, end in pairwise(places)]
    whole, cut = read([Part(0, path)], [DataSource(path=str(path))]), read(parts, [DataSource(path=str(path))])
    if size:
        assert cut == whole  # documents, counts, and the places of malformed lines


def test_parquet_is_cut_between_row_groups(tmp_path: Path) -> None:
    path, texts = tmp_path / "a.parquet", [f"text {number}" for number in range(100)]
    pyarrow.parquet.write_table(pyarrow.table({"text": [*texts, None]}), path, row_group_size=10)
    parts = [Part(0, path, 0, 3), Part(0, path, 3, 4), Part(0, path, 4, 11)]
    found, counts = read(parts, [DataSource(path=str(path))])
    assert found == [text.encode() for text in texts]
    assert (counts.files, counts.places) == (1, [f"{path}:101: field 'text' is null, not text"])


def write_sizes(folder: Path, sizes: dict[str, int]) -> None:
    folder.mkdir()
    for name, size in sizes.items():
        (folder / name).write_bytes(b"x" * size)


def test_long_files_are_cut_and_short_ones_share_a_piece_of_one_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "SMALLEST", 1000)
    write_sizes(tmp_path / "a", {f"{number}.txt": 400 for number in range(5)})
    write_sizes(tmp_path / "b", {"long.jsonl": 3500, "packed.jsonl.gz": 900, "whole.txt": 3000, "z.txt": 1})
    sources = [DataSource(path=str(tmp_path / "a")), DataSource(path=str(tmp_path / "b"))]
    listed = cut_input("", list_inputs(sources))
    named = [[(part.source, part.path.name if part.path else "") for part in piece] for piece in listed.pieces]
    assert named == [
        [(0, "0.txt"), (0, "1.txt")], [(0, "2.txt"), (0, "3.txt")], [(0, "4.txt")],
        [(1, "long.jsonl")], [(1, "long.jsonl")], [(1, "long.jsonl")], [(1, "long.jsonl")],
        [(1, "packed.jsonl.gz")], [(1, "whole.txt")], [(1, "z.txt")],
    ]  # fmt: skip
    assert [(part.start, part.end) for piece in listed.pieces[3:7] for part in piece] == [
        (0, 875), (875, 1750), (1750, 2625), (2625, 3500),
    ]  # fmt: skip


def test_large_parquet_is_cut_into_pieces_of_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    texts = [os.urandom(500).hex() for _ in range(100)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=10)
    monkeypatch.setattr(pieces, "SMALLEST", path.stat().st_size)
    sources = [DataSource(path=str(path))]
    listed = cut_input("", list_inputs(sources))
    ranges = [(part.start, part.end) for piece in listed.pieces for part in piece]
    assert len(ranges) == len(listed.pieces) == 5  # four times its size as text
    assert [start for start, _ in ranges[1:]] == [end for _, end in ranges[:-1]]
    assert read([part for piece in listed.pieces for part in piece], sources)[0] == [text.encode() for text in texts]


def test_the_list_comes_back_and_a_changed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"na\xffme.jsonl")
    path.write_bytes(b'{"text": "a"}\n')
    listed = cut_input("config", list_inputs([DataSource(path=str(tmp_path / "*.jsonl"))]))
    with pytest.raises(NotReadyError, match="not listed yet"):
        read_pieces(tmp_path / "pieces.json")
    listed.write(tmp_path / "pieces.json")
    again = read_pieces(tmp_path / "pieces.json")
    assert again.to_json() == listed.to_json()
    assert again.pieces == listed.pieces
    again.check_unchanged(0)
    path.write_bytes(b'{"text": "abc"}\n')
    with pytest.raises(UserError, match="it has changed while tokenize was at work"):
        again.check_unchanged(0)
    (tmp_path / "pieces.json").write_text(json.dumps({"files": []}))
    with pytest.raises(UserError, match="not a list of pieces"):
        read_pieces(tmp_path / "pieces.json")


def test_a_document_that_memory_should_not_hold_is_malformed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MOST_BYTES", 100)
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_bytes(b"x" * 101)
    lines.write_bytes(b'{"text": "' + b"y" * 1000 + b'"}\n{"text": "z"}\n')
    found, counts = read([Part(0, text), Part(0, lines)], [DataSource(path=str(tmp_path))])
    assert (found, counts.malformed) == ([b"z"], 2)
    assert [place.split(": longer than")[0] for place in counts.places] == [str(text), f"{lines}:1"]
