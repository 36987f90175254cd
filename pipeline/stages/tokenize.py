"""Turn the Config's text into a tokenizer and token shards: read, train, encode, index."""

from __future__ import annotations

from pipeline.stages import early  # noqa: F401 - first: signals are taken while the rest is imported

# isort: split
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.config_stage import StageSection
from pipeline.errors import UserError
from pipeline.files import atomic_path, read_json, write_json
from pipeline.lm.documents import Document, ReadCounts, read_piece
from pipeline.lm.shards import SPLITS, ShardWriter, SplitStatistics, TokenShards, split_of, write_index
from pipeline.lm.sources import Piece, list_pieces
from pipeline.lm.tokenizer import Tokenizer, train_tokenizer
from pipeline.run import Run
from pipeline.stages.main import Attempt, run_stage

ENCODE_BYTES = 8 << 20  # text given to the encoder at a time
PROGRESS_SECONDS = 5.0


def tokenize(run: Run, config: Config) -> None:
    """Write data/ of the Run: tokenizer.model, then the shards, then index.json, whose presence means complete.

    What is complete is left as it is. The same text and config give the same bytes, however often it was interrupted.
    Raises UserError for text that can't be read or does not suffice.
    """
    inputs = fingerprint_config(config)
    if is_complete(run, inputs):
        say(f"{run.index} is complete: nothing to do")
        return
    pieces = list_pieces(config.data)
    start(run, inputs, pieces)
    tokenizer = make_tokenizer(run, config, pieces)
    counts = ReadCounts()
    splits = encode(run, config, pieces, tokenizer, counts)
    check_counts(config, counts, {name: statistics.documents for name, statistics in splits.items()})
    print_table(write_index(run.data, inputs, tokenizer, counts, splits))


def say(message: str) -> None:
    """Talk to the person or log that watches; results go to stdout."""
    print(f"tokenize: {message}", file=sys.stderr, flush=True)


# -- what is complete -------------------------------------------------------------------------------------------------


def fingerprint_config(config: Config) -> str:
    """Hash what decides the data's bytes: the sources and the tokenize section without time limits and the like."""
    elsewhere = {*StageSection.model_fields, "max_malformed_share"}
    wanted = {
        "data": [source.model_dump(mode="json") for source in config.data],
        "tokenize": config.tokenize.model_dump(mode="json", exclude=elsewhere),
    }
    return _hash(wanted)


def fingerprint_files(pieces: Iterable[Piece]) -> str:
    """Hash the names, sizes and times of the input files, so that a changed one is not mixed with older work."""
    files = []
    for piece in pieces:
        if piece.path is not None:
            status = piece.path.stat()
            files.append([str(piece.path), status.st_size, status.st_mtime_ns])
    return _hash(files)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def is_complete(run: Run, inputs: str) -> bool:
    """Say whether the data is there. Raises UserError where it is damaged, or was made with another config."""
    index = run.read_index()
    if index is None:
        return False
    if index.get("inputs") != inputs:
        raise UserError(
            f"{run.index}: made with other data: or tokenize: settings than {run.config} has now. Checkpoints may "
            f"depend on it, so it is left alone: take a new Run name, or remove {run.data} to make it again"
        )
    for split in SPLITS:
        TokenShards(run.data, split).check_tokenizer(Tokenizer(run.tokenizer))
    return True


def start(run: Run, inputs: str, pieces: list[Piece]) -> None:
    """Keep what an interrupted attempt left if its config and files are ours, else remove it."""
    record = {"config": inputs, "files": fingerprint_files(pieces)}
    started = run.data / "inputs.json"
    for path in run.data.glob(".*.tmp"):  # of an attempt that was killed
        path.unlink(missing_ok=True)
    if read_json(started) != record:
        run.tokenizer.unlink(missing_ok=True)
        write_json(started, record)


# -- phases -----------------------------------------------------------------------------------------------------------


def make_tokenizer(run: Run, config: Config, pieces: list[Piece]) -> Tokenizer:
    """Return the Run's tokenizer: the one an earlier attempt made, a copy of the given one, or a new one."""
    if run.tokenizer.is_file():
        say(f"{run.tokenizer} is there already")
    elif config.tokenize.tokenizer is not None:
        copy_tokenizer(Path(config.tokenize.tokenizer), run.tokenizer, config.tokenize.vocab_size)
    else:
        learn_tokenizer(run, config, pieces)
    return Tokenizer(run.tokenizer)


def copy_tokenizer(source: Path, target: Path, vocab_size: int) -> None:
    """Copy an existing model into the Run. Raises UserError unless it is one of `vocab_size` tokens."""
    tokenizer = Tokenizer(source)
    if tokenizer.vocab_size != vocab_size:
        raise UserError(
            f"tokenize.vocab_size is {vocab_size}, but {source} has {tokenizer.vocab_size} tokens: "
            f"write tokenize.vocab_size: {tokenizer.vocab_size}"
        )
    if not tokenizer.is_exact():
        say(f"warning: {source} does not give back every text as it was (it normalises)")
    with atomic_path(target) as temporary:
        temporary.write_bytes(source.read_bytes())
    say(f"tokenizer {source}: {vocab_size} tokens")


def learn_tokenizer(run: Run, config: Config, pieces: list[Piece]) -> None:
    """Train on the train split only. All the text is read here, so what is wrong with it shows before the work."""
    counts = ReadCounts()
    documents = dict.fromkeys(SPLITS, 0)

    def train_texts() -> Iterator[bytes]:
        for document in watch("read", pieces, counts):
            split = split_of(hashlib.sha256(document.text).digest(), config.tokenize.validation_fraction)
            documents[split] += 1
            if split == "train":
                yield document.text
        check_counts(config, counts, documents)
        say(f"training a {config.tokenize.model_type} tokenizer of {config.tokenize.vocab_size} tokens")

    report = train_tokenizer(train_texts(), config.tokenize, run.tokenizer)
    say(f"tokenizer trained: {report}")


def encode(
    run: Run, config: Config, pieces: list[Piece], tokenizer: Tokenizer, counts: ReadCounts
) -> dict[str, SplitStatistics]:
    """Write the shards of both splits; exact duplicates are dropped and counted."""
    writers = {split: ShardWriter(run.data, split, tokenizer, config.tokenize.shard_tokens) for split in SPLITS}
    threads = config.threads or len(os.sched_getaffinity(0))
    seen: set[bytes] = set()
    for group in grouped(watch("encoded", pieces, counts), ENCODE_BYTES):
        fresh = []
        for document in group:
            digest = hashlib.sha256(document.text).digest()
            writer = writers[split_of(digest, config.tokenize.validation_fraction)]
            if digest[:16] in seen:  # 128 bits are enough to tell texts apart
                writer.statistics.duplicates += 1
                continue
            seen.add(digest[:16])
            fresh.append((writer, document.text))
        ids = tokenizer.encode_documents([text for _, text in fresh], threads)
        for (writer, text), tokens in zip(fresh, ids, strict=True):
            writer.add(tokens, len(text))
    for writer in writers.values():
        writer.flush()
    return {split: writer.statistics for split, writer in writers.items()}


def grouped(documents: Iterable[Document], size: int) -> Iterator[list[Document]]:
    """Group documents until `size` bytes of text are together."""
    group: list[Document] = []
    together = 0
    for document in documents:
        group.append(document)
        together += len(document.text)
        if together >= size:
            yield group
            group, together = [], 0
    if group:
        yield group


def check_counts(config: Config, counts: ReadCounts, documents: dict[str, int]) -> None:
    """Raise UserError where too much is malformed, or a split has no document."""
    counts.check_malformed(config.tokenize.max_malformed_share)
    if counts.documents == 0:
        raise UserError(f"too little data: 0 documents with text ({counts}). See data: in the config")
    fraction = config.tokenize.validation_fraction
    for split, number in documents.items():
        if number == 0:
            others = sum(documents.values())
            raise UserError(
                f"too little data: the {split} split is empty: 0 of {others} documents, chosen by hash at "
                f"tokenize.validation_fraction {fraction} ({counts}). Give more documents, or change that key"
            )


# -- what a person sees -----------------------------------------------------------------------------------------------


def watch(verb: str, pieces: list[Piece], counts: ReadCounts) -> Iterator[Document]:
    """Read all pieces in order, with a line of progress now and then and one at the end."""
    started = said = time.monotonic()
    for number, piece in enumerate(pieces, start=1):
        for document in read_piece(piece, counts):
            yield document
            if time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                say(f"{progress(verb, counts, said - started)} ({number} of {len(pieces)} inputs)")
    if counts.empty_files:
        say(f"warning: {len(counts.empty_files)} files have 0 bytes, the first is {counts.empty_files[0]}")
    say(f"{progress(verb, counts, time.monotonic() - started)} ({counts})")


def progress(verb: str, counts: ReadCounts, seconds: float) -> str:
    megabytes = counts.text_bytes / 1e6
    return f"{verb} {counts.documents:,} documents, {megabytes:.1f} MB, {megabytes / max(seconds, 1e-6):.1f} MB/s"


def print_table(index: dict[str, Any]) -> None:
    """Print the statistics of the index, one column a split."""
    splits = index["splits"]
    print(f"{'':24}" + "".join(f"{name:>16}" for name in splits))
    for key in ("documents", "duplicates", "bytes", "tokens", "bytes_per_token", "longest_document"):
        values = [splits[name][key] for name in splits]
        cells = [f"{value:.3f}" if isinstance(value, float) else f"{value:,}" for value in values]
        print(f"{key.replace('_', ' '):24}" + "".join(f"{cell:>16}" for cell in cells))
    print(f"{'shards':24}" + "".join(f"{len(splits[name]['shards']):>16,}" for name in splits))
    read, tokenizer = index["read"], index["tokenizer"]
    print(", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in read.items()))
    print(f"tokenizer {tokenizer['fingerprint'][:12]}: {tokenizer['vocab_size']:,} tokens, ids as {index['dtype']}")


def main(run: Run, config: Config, attempt: Attempt) -> None:
    tokenize(run, config)


if __name__ == "__main__":
    sys.exit(run_stage("tokenize", main))
