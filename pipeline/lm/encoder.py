"""Turn many documents into ids, fast: exactly the ids that SentencePiece gives each document by itself.

A piece never spans a pair of neighbouring bytes that no piece of the vocabulary holds, so BPE may be done on the parts
between such pairs ("words") one by one, and each distinct word once. Finding the cuts is a look-up for every pair of
bytes (NumPy), finding the distinct words a hash table (Arrow), and only new words are given to SentencePiece.
Unigram models are given whole documents: see Vocabulary.cuts_exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.lm.shards import DTYPES, Ids, dtype_for
from pipeline.lm.tokenizer import Tokenizer
from pipeline.lm.vocabulary import BLANK, Vocabulary

WORDS_AT_ONCE = 1 << 20  # more make fewer look-ups, fewer a smaller hash table
PAIRS_AT_ONCE, GATHERED_WORDS = 1 << 17, 1 << 16  # so few that what is made of them stays in the CPU's cache
JOINED_WORDS = 32  # a call costs more than a word, but SentencePiece slows down with long texts
MOST_WORDS, MOST_BYTES = 1_000_000, 64 << 20  # remembered, then all are forgotten: about 200 MB

Places = NDArray[np.int64]

END = b"\xff"
"""Stands for the end of a document among the texts: a byte that UTF-8 never has, so always a word of its own."""


class Encoder:
    """Encode documents by one tokenizer. It remembers words: make one per process, and keep it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.dtype = DTYPES[dtype_for(tokenizer.vocab_size)]
        self._words: _Words | None = None
        if tokenizer.vocabulary.cuts_exactly:
            is_cut = cut_pairs(tokenizer.vocabulary)
            if separator := find_separator(is_cut):
                self._words = _Words(tokenizer, self.dtype, is_cut, separator)

    def encode(self, texts: Sequence[bytes]) -> tuple[Ids, Places]:
        """Return the ids (N,) of all `texts` (UTF-8 that was checked), each followed by the end-of-document id, and
        where each ends (D,), its end-of-document id included.

        The ids are of the type that shards have. They do not depend on what else is encoded, or was before.
        """
        if not texts:
            return np.empty(0, self.dtype), np.empty(0, np.int64)
        if self._words is not None:
            return self._words.encode(texts)
        end = np.array([self.tokenizer.eos_id], np.int32)
        parts = self.tokenizer.encode_documents(list(texts), 1)
        ends = np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)) + 1)
        return np.concatenate([array for part in parts for array in (part, end)]).astype(self.dtype), ends


class _Words:
    """BPE by words, of which each is encoded once."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype[Any], is_cut: NDArray[np.bool_], separator: bytes) -> None:
        self._tokenizer, self._dtype, self._is_cut, self._separator = tokenizer, dtype, is_cut, separator
        self._forget()

    def encode(self, texts: Sequence[bytes]) -> tuple[Ids, Places]:
        """Do what Encoder.encode says."""
        import pyarrow  # 0.2 s to import, and only needed here

        if any(BLANK in text for text in texts):  # to SentencePiece it is a blank
            texts = [text.replace(BLANK, b" ") for text in texts]
        data = END.join(texts) + END
        text_ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)) + 1) - 1
        places = self._cut(data)
        end_words = np.searchsorted(places, text_ends)
        buffer = pyarrow.py_buffer(data)
        parts: list[Ids] = []
        sizes: list[Places] = []
        for first in range(0, len(places) - 1, WORDS_AT_ONCE):
            some = places[first : first + WORDS_AT_ONCE + 1]
            words = pyarrow.Array.from_buffers(
                pyarrow.large_binary(), len(some) - 1, [None, pyarrow.py_buffer(some), buffer]
            ).dictionary_encode()
            numbers, indices = self._look_up(words.dictionary.to_pylist()), words.indices.to_numpy()
            sizes.append(self._sizes.values[numbers][indices])
            parts += self._gather(numbers, indices)
        stops = np.cumsum(np.concatenate(sizes), dtype=np.int64)
        return np.concatenate(parts), stops[end_words]

    def _cut(self, data: bytes) -> Places:
        """Return where each word begins, and at last where the last ends."""
        parts = [np.zeros(1, np.int64)]
        found = np.empty(PAIRS_AT_ONCE, np.bool_)
        for start in range(0, len(data) - 1, PAIRS_AT_ONCE):
            number = min(PAIRS_AT_ONCE, len(data) - 1 - start)
            for offset in (0, 1):  # two bytes are read as one number, so every second pair is there at once
                pairs = np.frombuffer(data, "<u2", (number + 1 - offset) // 2, start + offset)
                found[offset:number:2] = self._is_cut.take(pairs, mode="clip")
            parts.append(np.flatnonzero(found[:number]) + (start + 1))
        return np.concatenate([*parts, [len(data)]])

    def _look_up(self, words: list[bytes]) -> Places:
        """Return the numbers of distinct words; those that are new are learned."""
        if len(self._numbers) > MOST_WORDS or self._bytes > MOST_BYTES:
            self._forget()
        numbers = np.fromiter(map(self._numbers.get, words, repeat(-1)), np.int64, len(words))
        if len(new := np.flatnonzero(numbers < 0)):
            numbers[new] = np.arange(len(new)) + len(self._numbers)
            self._learn([words[number] for number in new])
        return numbers

    def _gather(self, numbers: Places, indices: NDArray[np.int32]) -> Iterator[Ids]:
        """Give the ids of the words numbered `numbers[indices]`, in parts."""
        starts, sizes = self._starts.values[numbers], self._sizes.values[numbers]
        for first in range(0, len(indices), GATHERED_WORDS):
            some = indices[first : first + GATHERED_WORDS]
            lengths = sizes[some]
            before = np.cumsum(lengths) - lengths
            places = np.repeat(starts[some] - before, lengths)
            places += np.arange(len(places))
            yield self._ids.values[places]

    def _learn(self, words: list[bytes]) -> None:
        """Encode words by SentencePiece, many in one text, and remember them."""
        separator = self._separator
        groups = [words[first : first + JOINED_WORDS] for first in range(0, len(words), JOINED_WORDS)]
        texts = [separator.join(group) + separator for group in groups]
        ids = np.concatenate(self._tokenizer.encode_documents(texts, 1))
        separators = ids == self._separator_id
        stops = np.flatnonzero(separators) - np.arange(len(words))
        self._remember(words, np.diff(stops, prepend=0), ids[~separators])

    def _remember(self, words: list[bytes], sizes: Places, ids: Ids) -> None:
        number = len(self._numbers)
        self._numbers.update(zip(words, range(number, number + len(words)), strict=True))
        self._bytes += sum(map(len, words))
        self._starts.add(np.cumsum(sizes) - sizes + len(self._ids.values))
        self._sizes.add(sizes)
        self._ids.add(ids)

    def _forget(self) -> None:
        """Know two words only: the end of a document, and what separates words."""
        self._numbers: dict[bytes, int] = {}
        self._bytes = 0
        self._starts, self._sizes = _Growing(np.dtype(np.int64)), _Growing(np.dtype(np.int64))
        self._ids = _Growing(self._dtype)
        (self._separator_id,) = self._tokenizer.encode_documents([self._separator], 1)[0]
        ids = np.array([self._tokenizer.eos_id, self._separator_id])
        self._remember([END, self._separator], np.array([1, 1]), ids)


class _Growing:
    """An array that is added to."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._room = np.empty(1024, dtype)
        self.values = self._room[:0]

    def add(self, values: NDArray[Any]) -> None:
        """Append `values`, in constant time per value."""
        size = len(self.values)
        if size + len(values) > len(self._room):
            room = np.empty(2 * (size + len(values)), self._room.dtype)
            room[:size] = self.values
            self._room = room
        self._room[size : size + len(values)] = values
        self.values = self._room[: size + len(values)]


def cut_pairs(vocabulary: Vocabulary) -> NDArray[np.bool_]:
    """Return for each pair of bytes (65,536,) whether text may be cut between them; the index is first + 256 x second.

    It may unless a piece holds the pair, or the second is a continuation byte of UTF-8, inside a character.
    """
    is_cut = np.ones((256, 256), np.bool_)  # [second, first]
    for piece in vocabulary.pieces:
        held = np.frombuffer(piece, np.uint8)
        is_cut[held[1:], held[:-1]] = False
    is_cut[0x80:0xC0] = False
    return is_cut.reshape(-1)


def find_separator(is_cut: NDArray[np.bool_]) -> bytes | None:
    """Return an ASCII character that no piece holds together with another, if there is one."""
    table = is_cut.reshape(256, 256)
    lead = np.r_[0:0x80, 0xC0:0x100]  # what a character can begin with
    for character in range(127, 0, -1):
        if table[character].all() and table[lead, character].all():
            return bytes([character])
    return None
