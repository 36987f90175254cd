"""Write a SentencePiece model as the tokenizer.json of Hugging Face, with the same ids for every text.

What decides the ids of a model of ours is little: blanks become U+2581, the best pair of neighbours is merged until
none is left (or the likeliest pieces are found), and a character without a piece is spelt in bytes. Special tokens that
are typed in a text are text. A model from elsewhere that does more is refused.

Equal for every text holds for BPE. A unigram model adds likelihoods, SentencePiece in fp32 and Hugging Face in fp64:
where two ways to cut a text are equally likely (long runs of one character), they may choose differently.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import sentencepiece

from pipeline.errors import UserError
from pipeline.lm.vocabulary import BPE, UNIGRAM, fields

BLANK = "\u2581"
NEVER = -1e6  # log-likelihood of what text must not match: bytes and special tokens
TRAINER, NORMALIZER = 2, 3  # fields of SentencePiece's ModelProto


def tokenizer_json(path: Path) -> dict[str, Any]:
    """Return what tokenizer.json says for the SentencePiece model at `path`.

    Raises UserError for a model that does what ours do not: normalises, drops blanks, or knows no bytes.
    """
    model = path.read_bytes()
    trainer = dict(fields(_only(model, TRAINER)))
    normalizer = dict(fields(_only(model, NORMALIZER)))
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    _check(path, trainer, normalizer, processor)
    prefix = bool(normalizer.get(3, 1))  # add_dummy_prefix
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
    steps = [{"type": "Prepend", "prepend": BLANK}, blanks] if prefix else [blanks]
    back = {"type": "Replace", "pattern": {"String": BLANK}, "content": " "}
    decoders: list[dict[str, Any]] = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(processor, number) for number in special_ids(processor)],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _unigram(processor) if trainer.get(3, UNIGRAM) == UNIGRAM else _bpe(processor),
    }


def special_ids(processor: Any) -> list[int]:
    """List the ids that stand for no text: unknown and control pieces."""
    return [n for n in range(processor.vocab_size()) if processor.is_unknown(n) or processor.is_control(n)]


def tokenizer_config(processor: Any, context: int) -> dict[str, Any]:
    """Return tokenizer_config.json; `context` is the most tokens that the model reads."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": processor.id_to_piece(processor.unk_id()),
        "eos_token": processor.id_to_piece(processor.eos_id()),
        "pad_token": processor.id_to_piece(processor.eos_id()),
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # </s> that is typed in a text is text
        "model_max_length": context,
    }


def _added(processor: Any, number: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": processor.id_to_piece(number), **flags}


def _is_text(processor: Any, number: int) -> bool:
    special = processor.is_control(number) or processor.is_unknown(number) or processor.is_byte(number)
    return not special and not processor.is_unused(number)


def _bpe(processor: Any) -> dict[str, Any]:
    """List the merges that SentencePiece makes: any two pieces whose join is a piece, the best-scored join first."""
    size = processor.vocab_size()
    pieces = {processor.id_to_piece(n): n for n in range(size)}
    text = {piece for piece, n in pieces.items() if _is_text(processor, n)}
    ranked = sorted((-processor.get_score(n), n) for n in range(size) if processor.id_to_piece(n) in text)
    merges = [
        [piece[:at], piece[at:]]
        for piece in (processor.id_to_piece(n) for _, n in ranked)
        for at in range(1, len(piece))
        if piece[:at] in text and piece[at:] in text
    ]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": processor.id_to_piece(processor.unk_id()),
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": pieces,
        "merges": merges,
    }


def _unigram(processor: Any) -> dict[str, Any]:
    size = processor.vocab_size()
    scores = [processor.get_score(n) if _is_text(processor, n) else NEVER for n in range(size)]
    vocab = [[processor.id_to_piece(n), score] for n, score in enumerate(scores)]
    return {"type": "Unigram", "unk_id": processor.unk_id(), "byte_fallback": True, "vocab": vocab}


def _check(path: Path, trainer: dict[int, Any], normalizer: dict[int, Any], processor: Any) -> None:
    extra = [n for n in range(processor.vocab_size()) if processor.is_unused(n)]
    reasons = {
        "is neither BPE nor unigram": trainer.get(3, UNIGRAM) not in (UNIGRAM, BPE),
        "has no byte pieces (byte_fallback)": not trainer.get(35, 0),
        "puts blanks behind words (treat_whitespace_as_suffix)": bool(trainer.get(24, 0)),
        "changes characters (normalization_rule_name)": bool(normalizer.get(2, b"")),
        "drops blanks (remove_extra_whitespaces)": bool(normalizer.get(4, 1)),
        "keeps blanks as they are (escape_whitespaces)": not normalizer.get(5, 1),
        "has pieces that users defined (user_defined_symbols)": bool(trainer.get(31)),
        "has unused pieces": bool(extra),
    }
    if broken := [reason for reason, holds in reasons.items() if holds]:
        raise UserError(
            f"{path}: this tokenizer {', and '.join(broken)}, which tokenizer.json cannot say with the same ids"
        )


def _only(message: bytes, number: int) -> bytes:
    """Return the one sub-message of this number, empty where there is none."""
    return next((value for field, value in fields(message) if field == number and isinstance(value, bytes)), b"")


def dump_tokenizer(path: Path, folder: Path, context: int) -> str:
    """Write tokenizer.json and tokenizer_config.json for the model at `path` into `folder`; return BPE or Unigram."""
    value = tokenizer_json(path)
    text = json.dumps(value, ensure_ascii=False)
    processor = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    settings = json.dumps(tokenizer_config(processor, context), indent=2)
    (folder / "tokenizer_config.json").write_text(settings + "\n", encoding="utf-8")
    return str(value["model"]["type"])
