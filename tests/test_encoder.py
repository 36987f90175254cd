"""The encoder: the ids of plain SentencePiece, for any text, any vocabulary and any company."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer import config, corpus

from pipeline.lm import encoder as module
from pipeline.lm.encoder import Encoder, cut_pairs, find_separator
from pipeline.lm.tokenizer import TRAINER_OPTIONS, Tokenizer, train_tokenizer
from pipeline.lm.vocabulary import BPE, UNIGRAM, Vocabulary, read_vocabulary

LETTERS = "aab bé€日本ü\n\t.,(_1 ▁"  # few, so that short texts hold many pieces
MODELS = {
    "bpe of code": ("bpe", 400, corpus()),
    "bpe of letters": ("bpe", 520, ["".join(random.Random(n).choices(LETTERS, k=200)).encode() for n in range(60)]),
    "bpe without merges": ("bpe", 285, corpus(20)),
    "unigram of code": ("unigram", 310, corpus()),
    "unigram of letters": (
        "unigram", 400, ["".join(random.Random(n).choices(LETTERS, k=200)).encode() for n in range(60)],
    ),
}  # fmt: skip

anything = st.text(st.characters(exclude_categories=["Cs"]))
pieces = st.sampled_from([*LETTERS, "  ", "    ", "return", " value", "self", "\r\n", "</s>", "<0x0A>", "\0", "\x7f"])
texts = st.lists(anything | st.lists(pieces, max_size=60).map("".join), min_size=1, max_size=6)


@pytest.fixture(scope="module", params=MODELS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    model_type, vocab_size, documents = MODELS[request.param]
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    train_tokenizer(documents, config(model_type=model_type).model_copy(update={"vocab_size": vocab_size}), path)
    return Tokenizer(path)


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> Encoder:
    return Encoder(tokenizer)


def check(encoder: Encoder, tokenizer: Tokenizer, documents: list[bytes]) -> None:
    """Compare with SentencePiece, and with the text."""
    ids, ends = encoder.encode(documents)
    assert ids.dtype == "<u2"
    found = np.split(ids, ends)
    assert found.pop().size == 0
    for document, its, wanted in zip(documents, found, tokenizer.encode_documents(documents, 1), strict=True):
        assert its[-1] == tokenizer.eos_id
        np.testing.assert_array_equal(its[:-1], wanted)
        assert tokenizer.eos_id not in its[:-1]  # no text is read as a special token
        assert tokenizer.decode(its).encode() == document.replace("▁".encode(), b" ")


@settings(max_examples=150, deadline=None)
@given(texts=texts)
def test_the_ids_are_those_of_plain_sentencepiece(encoder: Encoder, tokenizer: Tokenizer, texts: list[str]) -> None:
    check(encoder, tokenizer, [text.encode() for text in texts])


def test_documents_of_words_and_lines(encoder: Encoder, tokenizer: Tokenizer) -> None:
    check(encoder, tokenizer, [b"", *corpus(30, seed=7), b"", b"a" * 5000, b""])
    check(encoder, tokenizer, [b""])
    assert [array.size for array in encoder.encode([])] == [0, 0]


def test_words_are_forgotten_when_there_are_too_many(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WORDS", 40)
    monkeypatch.setattr(module, "WORDS_AT_ONCE", 16)
    monkeypatch.setattr(module, "PAIRS_AT_ONCE", 7)
    monkeypatch.setattr(module, "SLOT_BITS", 4)  # so that most find their slot taken
    monkeypatch.setattr(module, "JOINED_WORDS", 3)
    encoder = Encoder(tokenizer)
    generator = random.Random(0)
    for _ in range(5):
        check(encoder, tokenizer, ["".join(generator.choices(LETTERS, k=100)).encode() for _ in range(3)])


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "<u2"), (65_537, "<u4"), (70_000, "<u4")])
def test_ids_have_the_type_that_holds_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    train_tokenizer(corpus(), config(), tmp_path / "m")
    tokenizer = Tokenizer(tmp_path / "m")
    tokenizer.vocab_size = vocab_size
    assert Encoder(tokenizer).encode([b"return"])[0].dtype == dtype


# -- what a model says of itself --------------------------------------------------------------------------------------


def test_a_model_is_known_by_its_file(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> None:
    vocabulary = tokenizer.vocabulary
    model_type = MODELS[request.node.callspec.params["tokenizer"]][0]
    assert vocabulary.algorithm == {"bpe": BPE, "unigram": UNIGRAM}[model_type]
    assert vocabulary.bytes_are_pieces
    assert vocabulary.keeps_text
    assert vocabulary.cuts_exactly == (model_type == "bpe")
    assert len(vocabulary.pieces) == tokenizer.vocab_size - 256 - 2  # bytes, <unk> and </s>


@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "nmt_nfkc"},
        {"add_dummy_prefix": True},
        {"remove_extra_whitespaces": True},
        {"byte_fallback": False},
        {"treat_whitespace_as_suffix": True},
    ],
)
def test_a_model_with_other_rules_is_given_whole_documents(tmp_path: Path, options: dict[str, object]) -> None:
    path = tmp_path / "m.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus()), model_writer=file, model_type="bpe",
            **TRAINER_OPTIONS | {"vocab_size": 300, "hard_vocab_limit": False} | options,
        )  # fmt: skip
    tokenizer = Tokenizer(path)
    assert not tokenizer.vocabulary.cuts_exactly
    documents = [b"  def  \xef\xac\x81 self ", "日本".encode()]
    ids, ends = Encoder(tokenizer).encode(documents)
    for its, wanted in zip(np.split(ids, ends), tokenizer.encode_documents(documents, 1), strict=False):
        np.testing.assert_array_equal(its[:-1], wanted)


@pytest.mark.parametrize("model", [b"\x0a", b"\x0a\xff", b"\x08\x80", b"\x0b", b"\x0a\x02\x10\x01\x0a\x02\x0a\x00\x0b"])
def test_a_file_that_is_no_model_is_refused(model: bytes) -> None:
    with pytest.raises(ValueError, match="not a "):
        read_vocabulary(model)


def test_text_is_cut_only_between_bytes_that_no_piece_holds_together() -> None:
    vocabulary = Vocabulary(BPE, [b"a", "bé".encode(), b"  "], True, True)
    table = cut_pairs(vocabulary).reshape(256, 256).T  # [first, second]
    assert table[ord("a"), ord("b")]
    assert table[0xA9, ord("a")]
    assert not table[ord("b"), 0xC3]
    assert not table[ord(" "), ord(" ")]
    assert not table[0xC3, 0xA9]  # inside a character
    assert not table[ord("b"), 0xA8]
    assert find_separator(table.T.reshape(-1)) == b"\x7f"


def test_a_vocabulary_that_joins_all_of_ascii_leaves_nothing_to_separate_words() -> None:
    vocabulary = Vocabulary(BPE, [bytes([first, 32]) for first in range(128)], True, True)
    assert find_separator(cut_pairs(vocabulary)) is None
