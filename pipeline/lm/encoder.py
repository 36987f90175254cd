"""Turn many documents into ids, fast: exactly the ids that SentencePiece gives each document by itself.

A piece never spans a pair of neighbouring bytes that no piece of the vocabulary holds, so BPE may be done on the parts
between such pairs ("words") one by one, and each distinct word once. Finding the cuts is a look-up for every pair of
bytes, finding the ids one for every word in a table of short words; the others are looked up in a dict, and only new
words are given to SentencePiece.
Unigram models are given whole documents: see Vocabulary.cuts_exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.lm.shards import DTYPES, Ids, dtype_for
from pipeline.lm.tokenizer import Tokenizer
from pipeline.lm.vocabulary import BLANK, Vocabulary

PAIRS_AT_ONCE, WORDS_AT_ONCE = 1 << 17, 1 << 16  # so few that what is made of them stays in the CPU's cache
JOINED_WORDS = 32  # a call costs more than a word, but SentencePiece slows down with long texts
MOST_WORDS, MOST_BYTES = 1_000_000, 64 << 20  # remembered, then all are forgotten: about 200 MB

Places = NDArray[np.int64]

END = b"\xff"
"""Stands for the end of a document among the texts: a byte that UTF-8 never has, so always a word of its own."""

KEY_BYTES = 16  # of a word that the table holds; 96 of 100 distinct words are no longer
KEY = np.dtype([("low", "<u8"), ("high", "<u8")])
ROW = np.dtype([*KEY.descr, ("start", "<i8"), ("size", "<i8")])  # 32 bytes, half a cache line
SLOT_BITS = 21  # of the table, which has 64 MB then
SIZE_BITS = 32  # of the number that stands for the place of a word's ids; the others are its start
MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)  # odd, and as good as random
NO_KEY = np.uint64(2**64 - 1)


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
        if any(BLANK in text for text in texts):  # to SentencePiece it is a blank
            texts = [text.replace(BLANK, b" ") for text in texts]
        data = END.join([*texts, bytes(KEY_BYTES)])  # a key is read from the last word, too
        places = self._cut(data, len(data) - KEY_BYTES)
        parts = []
        for first in range(0, len(places) - 1, WORDS_AT_ONCE):
            if len(self._known) > MOST_WORDS or self._bytes > MOST_BYTES:
                self._forget()
            parts.append(self._encode_words(data, places[first : first + WORDS_AT_ONCE + 1]))
        ids = np.concatenate(parts)
        return ids, np.flatnonzero(ids == self._tokenizer.eos_id) + 1

    def _cut(self, data: bytes, size: int) -> Places:
        """Return where each word of data[:size] begins, and at last where the last ends."""
        parts = [np.zeros(1, np.int64)]
        found = np.empty(PAIRS_AT_ONCE, np.bool_)
        for start in range(0, size - 1, PAIRS_AT_ONCE):
            number = min(PAIRS_AT_ONCE, size - 1 - start)
            for offset in (0, 1):  # two bytes are read as one number, so every second pair is there at once
                pairs = np.frombuffer(data, "<u2", (number + 1 - offset) // 2, start + offset)
                found[offset:number:2] = self._is_cut.take(pairs, mode="clip")
            parts.append(np.flatnonzero(found[:number]) + (start + 1))
        return np.concatenate([*parts, [size]])

    def _encode_words(self, data: bytes, places: Places) -> Ids:
        """Return the ids of the words that `places` bound."""
        keys = keys_of(data, places)
        slots = ((keys["low"] * MIX[0] + keys["high"] * MIX[1]) >> np.uint64(64 - SLOT_BITS)).view(np.int64)
        rows = self._table.take(slots)
        missed = np.flatnonzero((rows["low"] != keys["low"]) | (rows["high"] != keys["high"]))
        if len(missed):
            bounds = zip(places[missed].tolist(), places[missed + 1].tolist(), strict=True)
            starts, sizes = self._look_up([data[start:end] for start, end in bounds])
            rows["start"][missed], rows["size"][missed] = starts, sizes
            self._enter(slots[missed], keys[missed], starts, sizes)
        sizes = rows["size"]
        before = np.cumsum(sizes) - sizes
        found = np.repeat(rows["start"] - before, sizes)
        found += np.arange(len(found))
        ids: Ids = self._ids.values[found]
        return ids

    def _enter(self, slots: Places, keys: NDArray[np.void], starts: Places, sizes: Places) -> None:
        """Put words that are known into the table, where their slots are free."""
        free = (self._table["size"][slots] == 0) & (keys["low"] != NO_KEY)
        rows = np.empty(np.count_nonzero(free), ROW)
        rows["low"], rows["high"] = keys["low"][free], keys["high"][free]
        rows["start"], rows["size"] = starts[free], sizes[free]
        self._table[slots[free]] = rows

    def _look_up(self, words: list[bytes]) -> tuple[Places, Places]:
        """Return where the ids of `words` (N) begin among all that are known, and how many each has; learn new ones."""
        if new := [word for word in dict.fromkeys(words) if word not in self._known]:
            self._learn(new)
        found = np.fromiter(map(self._known.__getitem__, words), np.int64, len(words))
        return found >> SIZE_BITS, found & ((1 << SIZE_BITS) - 1)

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
        starts = np.cumsum(sizes) - sizes + len(self._ids.values)
        self._known.update(zip(words, (starts << SIZE_BITS | sizes).tolist(), strict=True))
        self._bytes += sum(map(len, words))
        self._ids.add(ids)

    def _forget(self) -> None:
        """Know two words only: the end of a document, and what separates words."""
        self._known: dict[bytes, int] = {}  # start and size of its ids
        self._table = np.zeros(1 << SLOT_BITS, ROW)
        self._table["low"][0] = NO_KEY  # all others are free for the key of zeros, which belongs here
        self._bytes = 0
        self._ids = _Growing(self._dtype)
        (self._separator_id,) = self._tokenizer.encode_documents([self._separator], 1)[0]
        ids = np.array([self._tokenizer.eos_id, self._separator_id])
        self._remember([END, self._separator], np.array([1, 1]), ids)


def _fillings() -> NDArray[np.uint64]:
    """Return for each size of a word (KEY_BYTES + 2, 2) the bytes after it, as a key with 0xFF there; the last: all."""
    sizes = np.arange(KEY_BYTES + 2)[:, None]
    sizes[-1] = 0
    return np.where(np.arange(KEY_BYTES) < sizes, 0, 0xFF).astype(np.uint8).view("<u8")


FILLINGS = _fillings()


def keys_of(data: bytes, places: Places) -> NDArray[np.void]:
    """Return the keys (N,) of the words between `places` (N + 1,) of `data`: their bytes, filled up with that of END.

    A word longer than KEY_BYTES has the key of END. There must be KEY_BYTES of `data` after the last.
    """
    anywhere = np.ndarray(len(data) - KEY_BYTES + 1, f"V{KEY_BYTES}", data, strides=(1,))
    keys = anywhere[places[:-1]].view("<u8").reshape(-1, 2)
    keys |= FILLINGS.take(np.diff(places), axis=0, mode="clip")
    return keys.reshape(-1).view(KEY)


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
    held = np.frombuffer(END.join(vocabulary.pieces), np.uint8)
    is_cut[held[1:], held[:-1]] = False
    is_cut[END[0]], is_cut[:, END[0]] = True, True
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
