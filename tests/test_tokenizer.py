"""The tokenizer: what goes in comes out, the same model every time, and clear words where it can't be."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.tokenize import TokenizeConfig
from pipeline.errors import NotReadyError, UserError
from pipeline.files import sha256_file
from pipeline.lm.tokenizer import Tokenizer, train_tokenizer

WORDS = "def return self import value while list of the data in step not None True print index".split()


def corpus(documents: int = 60, seed: int = 0) -> list[bytes]:
    generator = random.Random(seed)
    return [
        "\n".join("    " * generator.randrange(3) + " ".join(generator.choices(WORDS, k=8)) for _ in range(20)).encode()
        for _ in range(documents)
    ]


def config(**values: object) -> TokenizeConfig:
    return TokenizeConfig.model_validate({"vocab_size": 310, **values})


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp(request.param) / "tokenizer.model"
    train_tokenizer(corpus(), config(model_type=request.param), path)
    return Tokenizer(path)


@pytest.mark.parametrize(
    "text",
    [
        "  a\tb\r\n\n cﬁ Ⅷ ",
        "\n",
        "\ufeffx\ufeff",
        " ",
        "a  b   c",
        "\r only \r",
        "a\0b",
        "\u2585 \u2047",
        "ＡＢＣ\u200b\u202eשלום\U0001f468\u200d\U0001f469",
        "</s><unk><s><pad><0x0A>",
        "def f():\n    return 1\n",
    ],
)
def test_text_comes_back_as_it_was(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.is_exact()


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
def test_any_text_comes_back_as_it_was(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_documented_exception_decodes_to_a_blank(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a▁b")) == "a b"


@pytest.mark.parametrize("text", ["b </s> c", "<unk>", "<0x0A>"])
def test_special_tokens_cannot_be_typed(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.eos_id not in ids
    assert 0 not in ids  # <unk>
    assert len(ids) > 1


def test_line_ends_and_indentation_are_pieces(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("    ")) < 4
    assert len(tokenizer.encode("\n")) == 1


def test_the_end_of_a_document_decodes_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.eos_id]) == "a"
    assert tokenizer.decode([]) == ""
    assert tokenizer.encode("").shape == (0,)


def test_documents_encode_alike_at_any_number_of_threads(tokenizer: Tokenizer) -> None:
    texts = corpus(10, seed=5)
    one, three = tokenizer.encode_documents(texts, 1), tokenizer.encode_documents(texts, 3)
    for text, a, b in zip(texts, one, three, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, tokenizer.encode(text.decode()))


@pytest.mark.parametrize("ids", [[10**6], [-1], [310]])
def test_an_id_outside_the_vocabulary_is_named(tokenizer: Tokenizer, ids: list[int]) -> None:
    with pytest.raises(UserError, match=rf"token id {ids[0]} is outside the vocabulary of 310"):
        tokenizer.decode(ids)


def test_bytes_and_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="not bytes"):
        tokenizer.encode(b"\xff\xfe")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="lone surrogate at character 1"):
        tokenizer.encode("a\ud800")
    with pytest.raises(UserError, match="row of integers"):
        tokenizer.decode(np.array([0.5]))


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_the_same_texts_in_any_order_train_the_same_model(tmp_path: Path, model_type: str) -> None:
    texts = corpus()
    paths = [tmp_path / "one", tmp_path / "two"]
    wanted = config(model_type=model_type, training_bytes=20_000)
    train_tokenizer(texts, wanted, paths[0])
    train_tokenizer(reversed(texts), wanted, paths[1])
    assert sha256_file(paths[0]) == sha256_file(paths[1])


# -- training text ----------------------------------------------------------------------------------------------------


def test_long_lines_are_cut_and_counted_not_left_out(tmp_path: Path) -> None:
    long = " ".join(random.Random(1).choices(WORDS, k=2000)).encode()
    report = train_tokenizer([long, *[b"short line\n"] * 10], config(), tmp_path / "m")
    assert (report.documents, report.documents_cut) == (11, 1)
    assert report.size == len(long) + len(b"short line\n")  # exact duplicates count once
    assert str(report) == f"11 documents, {report.size:,} bytes used, 1 cut"


def test_only_long_lines_without_blanks_are_usable(tmp_path: Path) -> None:
    long = "".join(random.Random(1).choices("abcdeü", k=50_000)).encode()
    assert train_tokenizer([long], config(), tmp_path / "m").size == len(long)


@pytest.mark.parametrize("texts", [[], [b""], [b"\n"] * 1000, [b"\0"]])
def test_no_usable_text_is_one_error(tmp_path: Path, texts: list[bytes]) -> None:
    with pytest.raises(UserError, match=f"too little data: no usable text .*{len(texts)} documents"):
        train_tokenizer(texts, config(), tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("texts", "vocab_size", "message"),
    [
        ([b"a" * 1000], 4096, r"vocab_size: 4096 is too high: 1,000 bytes of text give at most \d+"),
        ([b"hello world\n"], 4096, r"vocab_size: 4096 is too high"),
        (["".join(map(chr, range(0x4E00, 0x4E00 + 200))).encode()], 300, r"300 is too low: .* need at least \d+"),
    ],
)
def test_a_vocabulary_that_does_not_fit_the_text(
    tmp_path: Path, texts: list[bytes], vocab_size: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train_tokenizer(texts, config(vocab_size=vocab_size), tmp_path / "m")


# -- models from elsewhere --------------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match="no tokenizer here"):
        Tokenizer(tmp_path / "missing.model")
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(UserError, match=r"bad\.model: not a SentencePiece model"):
        Tokenizer(tmp_path / "bad.model")


def test_a_model_that_normalises_is_known_for_it(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\n".join(corpus()))
    prefix = tmp_path / "lossy"
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(prefix), vocab_size=60, minloglevel=2, hard_vocab_limit=False
    )
    assert not Tokenizer(prefix.with_suffix(".model")).is_exact()
