"""Train and use SentencePiece models whose decode(encode(text)) is the text, byte for byte.

The one exception is U+2581 (▁), SentencePiece's own sign for a blank: it decodes to a blank.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from pipeline.config.tokenize import TokenizeConfig
from pipeline.errors import NotReadyError, UserError
from pipeline.files import atomic_path
from pipeline.lm.sample import Sample
from pipeline.lm.vocabulary import Vocabulary, read_vocabulary

TRAINER_OPTIONS: dict[str, Any] = {
    # exactness: what goes in comes out
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "byte_fallback": True,  # every byte has a piece, so nothing is ever unknown
    # what pieces may look like: line ends and indentation are most of source code
    "allow_whitespace_only_pieces": True,
    "split_by_whitespace": True,
    "split_by_unicode_script": True,
    "split_by_number": True,
    "split_digits": False,
    "max_sentencepiece_length": 16,
    "character_coverage": 0.9995,  # rarer characters are left to the byte pieces
    # special tokens: only these two
    "unk_id": 0,
    "eos_id": 1,
    "bos_id": -1,
    "pad_id": -1,
    # the same model every time, on every machine: unigram adds floats in the order of the threads
    "num_threads": 4,
    "shuffle_input_sentence": False,
    "input_sentence_size": 0,
    # longer sentences would be left out silently; ours are cut well below it
    "max_sentence_length": 4 * 4096,
    "hard_vocab_limit": True,
    "minloglevel": 2,
}
_PROBE = "  a\tb\r\n\n cﬁ Ⅷ \ufeff\0 \U0001f600 </s>"


def train_tokenizer(texts: Iterable[bytes], config: TokenizeConfig, path: Path) -> Sample:
    """Train a model on a sample of at most `config.training_bytes` of `texts` (UTF-8) and write it to `path`.

    The same texts, in any order, give the same file. Raises UserError where there is no usable text, or too little or
    too varied text for `config.vocab_size`.
    """
    sample = Sample(config.training_bytes)
    for text in texts:
        sample.add(text)
    train_on_sample(sample, config, path)
    return sample


def train_on_sample(sample: Sample, config: TokenizeConfig, path: Path) -> None:
    """Do the same with a sample that was drawn already."""
    passages = list(sample.passages())
    if not passages:
        raise UserError(
            f"too little data: no usable text to train the tokenizer on ({sample.documents} documents, "
            f"{sample.size} bytes; tokenize.training_bytes is {config.training_bytes})"
        )
    model = _train(passages, config)
    with atomic_path(path) as temporary:
        temporary.write_bytes(model)


def _train(passages: Sequence[bytes], config: TokenizeConfig) -> bytes:
    model = io.BytesIO()
    sentencepiece.set_random_generator_seed(0)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(passages),
            model_writer=model,
            vocab_size=config.vocab_size,
            model_type=config.model_type,
            **TRAINER_OPTIONS,
        )
    except RuntimeError as error:
        raise UserError(_explain(str(error), config.vocab_size, sum(map(len, passages)))) from error
    return model.getvalue()


def _explain(message: str, vocab_size: int, size: int) -> str:
    """Say a trainer's complaint in the words of the config."""
    key = f"tokenize.vocab_size: {vocab_size}"
    if match := re.search(r"too high .*<= (\d+)", message):
        return f"{key} is too high: {size:,} bytes of text give at most {match[1]}. Lower it, or give more text"
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return f"{key} is too low: bytes, special tokens and the characters of the text need at least {match[1]}"
    return f"the tokenizer can't be trained ({key}, {size:,} bytes of text): {message}"


class Tokenizer:
    """Turn text into token ids and back by the SentencePiece model at `path`."""

    def __init__(self, path: Path) -> None:
        """Load the model. Raises NotReadyError where there is none, UserError where it can't be used."""
        try:
            model = path.read_bytes()
        except FileNotFoundError:
            raise NotReadyError(f"{path}: no tokenizer here (yet): run tokenize first") from None
        except OSError as error:
            raise UserError(f"{path}: can't read the tokenizer: {error.strerror}") from error
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise UserError(f"{path}: not a SentencePiece model") from error
        self.path = path
        self.fingerprint = hashlib.sha256(model).hexdigest()
        self.vocab_size: int = self._processor.vocab_size()
        self.eos_id: int = self._processor.eos_id()
        if self.eos_id < 0:
            raise UserError(f"{path}: this tokenizer has no end-of-document token (</s>), which we need")

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What the model file says of itself; reading it takes a second for 250,000 pieces."""
        return read_vocabulary(self._processor.serialized_model_proto())

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the ids (N,) of `text`, without an end-of-document token.

        Special tokens typed in the text are text. Raises UserError for bytes and for a lone surrogate.
        """
        if not isinstance(text, str):
            raise UserError(f"the tokenizer encodes text (str), not {type(text).__name__}: decode it as UTF-8 first")
        try:
            return self.encode_documents([text.encode("utf-8")], 1)[0]
        except UnicodeEncodeError as error:
            raise UserError(f"not valid Unicode: a lone surrogate at character {error.start}") from None

    def encode_documents(self, texts: list[bytes], threads: int) -> list[NDArray[np.int32]]:
        """Return the ids (N,) of each text (UTF-8 that was checked); the same whatever the number of threads."""
        result: list[NDArray[np.int32]] = self._processor.encode(texts, num_threads=threads, return_type="numpy")
        return result

    def decode(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
        """Return the text of `ids` (N,); the end-of-document token gives none, cut characters give U+FFFD.

        Raises UserError for an id outside the vocabulary.
        """
        array = np.asarray(ids)
        if array.size == 0:
            return ""
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise UserError(f"token ids are a row of integers, not {array.dtype} of shape {array.shape}")
        if array.min() < 0 or array.max() >= self.vocab_size:
            bad = array[(array < 0) | (array >= self.vocab_size)][0]
            raise UserError(f"token id {bad} is outside the vocabulary of {self.vocab_size} ids ({self.path})")
        text: str = self._processor.decode(array.tolist())
        return text

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of text that an id stands for, none for a special token."""
        if self._processor.is_byte(token):
            return bytes([int(self._processor.id_to_piece(token)[3:-1], 16)])  # <0x41>
        if self._processor.is_control(token):
            return b""
        piece: str = self._processor.id_to_piece(token)
        return (" \u2047 " if self._processor.is_unknown(token) else piece.replace("\u2581", " ")).encode()

    def is_exact(self) -> bool:
        """Say whether a text of hard cases comes back as it was; false for models that normalise."""
        return self.decode(self.encode(_PROBE)) == _PROBE
