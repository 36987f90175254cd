"""Duplicates: the first of each text in the input stays, wherever its pieces lie and however many hashes fit in memory."""

from __future__ import annotations

from itertools import pairwise
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shards_of import write_piece

from pipeline.lm.duplicates import find_duplicates
from pipeline.lm.encoding import PieceOutput
from pipeline.lm.indexing import write_data
from pipeline.lm.shards import TokenShards

TOKENIZER = SimpleNamespace(vocab_size=1000, eos_id=1, fingerprint="f" * 64, is_exact=lambda: True)


def outputs(folder: Path, *texts: list[int]) -> list[PieceOutput]:
    """Make pieces of documents of one id each; the id is also the text."""
    made = []
    for number, ids in enumerate(texts):
        piece = {"train": [[text] for text in ids]}
        made.append(write_piece(folder / "pieces" / str(number), piece, TOKENIZER, digests=[t << 59 for t in ids]))
    return made


def test_the_first_stays_across_pieces(tmp_path: Path) -> None:
    made = outputs(tmp_path, [7, 8, 7], [9, 8], [], [9, 7, 10])
    index = write_data(tmp_path, "", TOKENIZER, made, [0] * 4, made_from="x", shard_tokens=4)
    ids = np.concatenate(list(TokenShards(tmp_path, "train")))
    assert ids[ids != 1].tolist() == [7, 8, 9, 10]
    assert (index["splits"]["train"]["documents"], index["splits"]["train"]["duplicates"]) == (4, 4)


def test_they_are_only_counted_where_the_config_says_so(tmp_path: Path) -> None:
    made = outputs(tmp_path, [7, 8, 7], [9, 8])
    index = write_data(tmp_path, "", TOKENIZER, made, [0, 0], made_from="x", shard_tokens=100, drop_duplicates=False)
    assert (index["splits"]["train"]["documents"], index["splits"]["train"]["duplicates"]) == (5, 2)


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.integers(2, 30), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=3))
def test_pieces_and_buckets_do_not_matter(
    tmp_path_factory: pytest.TempPathFactory, texts: list[int], cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("duplicates")
    ends = sorted({0, *(cut for cut in cuts if cut < len(texts)), len(texts)})
    made = outputs(folder, *(texts[start:end] for start, end in pairwise(ends)))
    if not made:
        return
    wanted = [text in texts[:at] for at, text in enumerate(texts)]
    for most in (100, 10, 3):
        found = find_duplicates(made, folder / f"marks-{most}", "x", most)
        assert found.marks[: len(texts)].tolist() == wanted


def test_those_of_an_earlier_attempt_are_taken_unless_they_are_damaged_or_of_other_pieces(tmp_path: Path) -> None:
    path = tmp_path / "marks.bin"
    wanted = [False, False, True]
    made = outputs(tmp_path, [7, 8, 7])
    assert find_duplicates(made, path, "these").marks.tolist() == wanted
    before = path.stat().st_mtime_ns, path.stat().st_ino
    assert find_duplicates(made, path, "these").marks.tolist() == wanted
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before
    for spoil in (lambda: path.write_bytes(bytes([0, 1, 1])), lambda: path.write_bytes(b""), path.unlink):
        spoil()
        assert find_duplicates(made, path, "these").marks.tolist() == wanted
    others = outputs(tmp_path / "others", [9, 9, 7])
    assert find_duplicates(others, path, "others").marks.tolist() == [False, True, False]


def test_a_text_in_both_splits_is_told(tmp_path: Path) -> None:
    piece = {"train": [[5], [6]], "validation": [[6]]}
    made = [write_piece(tmp_path / "pieces" / "0", piece, TOKENIZER, digests=[5, 6, 6])]
    assert write_data(tmp_path, "", TOKENIZER, made, [0], made_from="x", shard_tokens=9)["in_both_splits"] == 1


def test_no_process_outlives_an_error(tmp_path: Path) -> None:
    def tell(*words: object) -> None:
        raise BrokenPipeError

    made = outputs(tmp_path, [7, 8, 9, 10])
    with pytest.raises(BrokenPipeError) as raised:
        write_data(tmp_path, "", TOKENIZER, made, [0], made_from="x", shard_tokens=2, processes=2, tell=tell)
    assert raised.tb is not None
    assert not active_children()


def test_shards_do_not_cross_sources(tmp_path: Path) -> None:
    made = outputs(tmp_path, [2, 3], [4], [5, 6])
    index = write_data(tmp_path, "", TOKENIZER, made, [0, 0, 1], made_from="x", shard_tokens=100)
    shards = TokenShards(tmp_path, "train")
    assert [(shard["source"], shard["documents"]) for shard in index["splits"]["train"]["shards"]] == [(0, 3), (1, 2)]
    assert [ids.tolist() for ids in shards] == [[2, 1, 3, 1, 4, 1], [5, 1, 6, 1]]
