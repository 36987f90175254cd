"""Training text for the tokenizer: an even sample, the same in any order and in any number of parts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.lm.sample import PASSAGE_BYTES, Sample, cut_text


@given(text=st.text("aé€\U0001f600 \n", max_size=200), limit=st.integers(4, 20))
def test_cutting_keeps_every_character(text: str, limit: int) -> None:
    parts = list(cut_text(text.encode(), limit))
    assert b"".join(parts) == text.encode()
    assert all(0 < len(part) <= limit and part.decode() for part in parts)


def test_cutting_prefers_line_ends_then_blanks() -> None:
    assert list(cut_text(b"ab\ncd ef", 6)) == [b"ab\n", b"cd ef"]
    assert list(cut_text(b"abc def ghi", 9)) == [b"abc def", b" ghi"]


def test_the_sample_is_spread_over_all_documents_and_stays_below_its_limit() -> None:
    sample = Sample(limit=100 * PASSAGE_BYTES)
    for number in range(1000):
        sample.add(bytes([97 + number % 26]) * PASSAGE_BYTES + str(number).encode())
    kept = list(sample.passages())
    assert sum(map(len, kept)) == sample.size <= sample.limit
    assert sample.size > 0.98 * sample.limit
    assert len({passage[:1] for passage in kept}) > 20


def drawn(limit: int, texts: list[bytes]) -> Sample:
    sample = Sample(limit)
    for text in texts:
        sample.add(text)
    return sample


@given(
    texts=st.lists(st.binary(min_size=1, max_size=30), max_size=40), cut=st.integers(0, 40), limit=st.integers(1, 200)
)
def test_the_order_and_the_parts_do_not_matter(texts: list[bytes], cut: int, limit: int) -> None:
    whole = drawn(limit, texts)
    parts = drawn(limit, texts[cut:])
    parts.merge(drawn(limit, texts[:cut]))
    for other in (parts, drawn(limit, texts[::-1])):
        assert list(other.passages()) == list(whole.passages())
        assert (other.size, other.documents) == (whole.size, whole.documents)
