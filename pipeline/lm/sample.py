"""Draw the text that a tokenizer is trained on: evenly from the whole corpus, whatever the order it is read in."""

from __future__ import annotations

import hashlib
import heapq
import re
from collections.abc import Iterator

PASSAGE_BYTES = 4096
"""Training text is sampled in passages of at most this many bytes."""

_UNTRAINABLE = re.compile(rb"\0|\xe2\x96\x85")
"""NUL and U+2585: the trainer silently leaves out a whole sentence that holds one, so sentences are cut there."""


class Sample:
    """Keep an evenly spread sample of at most `limit` bytes of passages, whatever the order they come in.

    Every passage has a number drawn from its document's hash; those with the lowest numbers stay (bottom-k sampling,
    Cohen and Kaplan 2007). One pass and `limit` bytes of memory do, exact duplicates count once, and samples of parts
    of a corpus merge into that of the whole.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self.documents = 0
        self.documents_cut = 0  # longer than PASSAGE_BYTES
        self._passages: dict[int, bytes] = {}
        self._heap: list[int] = []  # negated: the highest number is the first to go
        self._bound = 1 << 64  # the lowest number that had to go; a later one above it would depend on the order

    def __str__(self) -> str:
        return f"{self.documents:,} documents, {self.size:,} bytes used, {self.documents_cut:,} cut"

    def add(self, text: bytes) -> None:
        """Offer one document (UTF-8)."""
        digest = hashlib.sha256(text).digest()
        number = -1
        for number, passage in enumerate(cut_text(text, PASSAGE_BYTES)):
            draw = hashlib.blake2b(digest + number.to_bytes(8, "big"), digest_size=8).digest()
            self._offer(int.from_bytes(draw, "big"), passage)
        self.documents += 1
        self.documents_cut += number > 0

    def merge(self, other: Sample) -> None:
        """Take in the sample of another part of the corpus, drawn with the same limit."""
        self._bound = min(self._bound, other._bound)
        for draw, passage in other._passages.items():
            self._offer(draw, passage)
        while self._heap and -self._heap[0] >= self._bound:
            self._drop_highest()
        self.documents += other.documents
        self.documents_cut += other.documents_cut

    def _offer(self, draw: int, passage: bytes) -> None:
        if draw >= self._bound or draw in self._passages:
            return
        self._passages[draw] = passage
        heapq.heappush(self._heap, -draw)
        self.size += len(passage)
        while self.size > self.limit:
            self._bound = self._drop_highest()

    def _drop_highest(self) -> int:
        draw = -heapq.heappop(self._heap)
        self.size -= len(self._passages.pop(draw))
        return draw

    def passages(self) -> Iterator[bytes]:
        """Give the passages in the order of their numbers, which is the same whatever order they came in."""
        for draw in sorted(self._passages):
            yield from (part for part in _UNTRAINABLE.split(self._passages[draw]) if part.strip())


def cut_text(text: bytes, limit: int) -> Iterator[bytes]:
    """Cut UTF-8 text into parts of at most `limit` bytes, after a line end, else before a blank, else anywhere
    between two characters.
    """
    start = 0
    while len(text) - start > limit:
        end = text.rfind(b"\n", start, start + limit) + 1
        if end <= start:
            end = text.rfind(b" ", start + 1, start + limit)
        if end <= start:
            end = start + limit
            while text[end] & 0xC0 == 0x80:  # a continuation byte: inside a character
                end -= 1
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]
