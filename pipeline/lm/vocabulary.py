"""Read what a SentencePiece model file says of itself, which the library does not tell: its algorithm and its rules.

The file is one protocol buffer message (sentencepiece_model.proto); the few fields that we need are read here, so that
no package has to be installed for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

BLANK = "▁".encode()
"""SentencePiece's sign for a blank, as UTF-8."""

UNIGRAM, BPE = 1, 2
NORMAL, USER_DEFINED, UNUSED, BYTE = 1, 4, 5, 6  # kinds of pieces that text can become


@dataclass(frozen=True)
class Vocabulary:
    """The pieces of a model that stand for text, with blanks as blanks (UTF-8), and the rules it was trained with."""

    algorithm: int
    pieces: list[bytes]
    bytes_are_pieces: bool  # all 256: nothing is unknown
    keeps_text: bool  # neither normalised, nor trimmed, nor prefixed

    @property
    def cuts_exactly(self) -> bool:
        """Say whether text that is cut where no piece spans gives the ids of the whole.

        BPE merges two neighbours only into a piece, by a rank of that piece alone. Unigram adds up floats from the
        beginning of the text, so rounding decides between equals by what came before.
        """
        return self.algorithm == BPE and self.bytes_are_pieces and self.keeps_text


def read_vocabulary(model: bytes) -> Vocabulary:
    """Read the content of a model file. Raises ValueError where it is not one."""
    pieces, byte_pieces = [], 0
    algorithm, trimmed, charsmap, prefix, suffix, escaped = UNIGRAM, True, b"", True, False, True
    for number, value in fields(model):
        message = dict(fields(value)) if isinstance(value, bytes) and number in (1, 2, 3) else {}
        if number == 1:
            kind = message.get(3, NORMAL)
            byte_pieces += kind == BYTE
            if kind in (NORMAL, USER_DEFINED, UNUSED):
                pieces.append(_bytes(message.get(1, b"")).replace(BLANK, b" "))
        elif number == 2:
            algorithm, suffix = _int(message.get(3, UNIGRAM)), bool(message.get(24, False))
        elif number == 3:
            charsmap, prefix = _bytes(message.get(2, b"")), bool(message.get(3, True))
            trimmed, escaped = bool(message.get(4, True)), bool(message.get(5, True))
    keeps_text = not (charsmap or prefix or trimmed or suffix) and escaped
    return Vocabulary(algorithm, pieces, byte_pieces == 256, keeps_text)


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("not a SentencePiece model: a number where text was expected")
    return value


def _int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("not a SentencePiece model: text where a number was expected")
    return value


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Give number and value of each field of a protocol buffer message."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        size, at = (8, at) if wire == 1 else (4, at) if wire == 5 else _varint(message, at)
        if wire not in (1, 2, 5) or at + size > len(message):
            raise ValueError(f"not a protocol buffer message: wire type {wire} at byte {at}")
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message):
            raise ValueError("not a protocol buffer message: it ends inside a number")
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
