"""Turn the Config's text into a tokenizer and token shards, in three phases.

    tokenizer   list the input and cut it into pieces (data/pieces.json), train or copy the tokenizer
    encode      make ids of each piece (data/pieces/00003/); the tasks of a Job array share them out
    index       put the pieces together: shards of one size without duplicates, and data/index.json, which is last

PIPELINE_PHASE names one of them; without it all are done, one after another. What is complete is left as it is, and the
same text and config give the same bytes, however the work was shared out and however often it was interrupted.
"""

from __future__ import annotations

from pipeline.stages import early  # noqa: F401 - first: signals are taken while the rest is imported

# isort: split
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.config.schema import Config
from pipeline.errors import NotReadyError, UserError
from pipeline.files import atomic_path
from pipeline.lm.documents import ReadCounts, hub_revision
from pipeline.lm.encoder import Encoder
from pipeline.lm.encoding import PieceOutput, encode_piece, read_piece
from pipeline.lm.finished import Written
from pipeline.lm.indexing import write_data
from pipeline.lm.pieces import PieceList, cut_input, read_pieces
from pipeline.lm.processes import in_processes
from pipeline.lm.sample import Sample
from pipeline.lm.shards import SPLITS, TokenShards, dtype_for, split_of
from pipeline.lm.sources import list_inputs
from pipeline.lm.tokenizer import Tokenizer, train_on_sample
from pipeline.run.folder import Run
from pipeline.run.inputs import (
    HashedRange,
    ReadFile,
    are_bound,
    changed_inputs,
    fingerprint,
    told,
    write_inputs,
)
from pipeline.stages.main import Attempt, run_stage

PROGRESS_SECONDS = 5.0
PIECE_SECONDS = 30.0  # after which a piece tells of itself
SAMPLED = 500  # times tokenize.training_bytes of input that are read at most to draw the tokenizer's sample from


def tokenize(run: Run, config: Config, phase: str = "", task: int = 0, tasks: int = 1) -> None:
    """Do one phase, or all of them; task `task` of `tasks` encodes every `tasks`-th piece.

    Raises UserError for text that can't be read or does not suffice, NotReadyError where an earlier phase is not done.
    """
    inputs = fingerprint(config)
    if is_complete(run, config, inputs, begins=phase in ("", "tokenizer")):
        say(f"{run.index} is complete: nothing to do")
        return
    if phase in ("", "tokenizer"):
        pieces = list_pieces(run, config, inputs)
        make_tokenizer(run, config, pieces)
    pieces = read_pieces(run.pieces)
    if pieces.config != inputs or not run.tokenizer.is_file():
        raise NotReadyError(f"{run.data}: the first phase of tokenize is not done for this config: run it first")
    if phase in ("", "encode"):
        encode(run, config, pieces, range(task, len(pieces.pieces), tasks))
    if phase in ("", "index"):
        write_index(run, config, pieces, inputs)


def say(message: str) -> None:
    """Talk to the person or log that watches; results go to stdout."""
    print(f"tokenize: {message}", file=sys.stderr, flush=True)


def processes_of(config: Config) -> int:
    """Return how many processes may work at a time."""
    return config.tokenize.processes or config.threads or len(os.sched_getaffinity(0))


# -- what is complete -------------------------------------------------------------------------------------------------


def is_complete(run: Run, config: Config, inputs: str, *, begins: bool) -> bool:
    """Say whether the data is there. Raises UserError where it is damaged, or was made with another config.

    Where the text has changed since, and no model knows the tokens, the phase that `begins` takes them away.
    """
    index = run.read_index()
    if index is None:
        return False
    if index.get("inputs") != inputs:
        raise UserError(
            f"{run.index}: made with other data: or tokenize: settings than {run.config} has now. Checkpoints may "
            f"depend on it, so it is left alone: take a new Run name, or remove {run.data} to make it again"
        )
    if begins and not are_bound(run) and (differences := changed_inputs(run, config)):
        say(f"the text has changed since the tokens were made, so they are made anew: {told(differences)}")
        remove_tokens(run)
        return False
    for split in SPLITS:
        TokenShards(run.data, split).check_tokenizer(Tokenizer(run.tokenizer))
    shutil.rmtree(run.piece(0).parent, ignore_errors=True)  # of an attempt that was killed in its last moment
    return True


def remove_tokens(run: Run) -> None:
    """Take away what was made of other text; the index goes first, without which there is no data."""
    for path in (run.index, run.inputs, run.pieces, run.tokenizer, run.verified, run.compressors):
        path.unlink(missing_ok=True)
    shutil.rmtree(run.piece(0).parent, ignore_errors=True)


# -- the first phase: pieces and tokenizer ----------------------------------------------------------------------------


def list_pieces(run: Run, config: Config, inputs: str) -> PieceList:
    """List the pieces; keep what an interrupted attempt left if its config and files are ours, else remove it."""
    pieces = cut_input(inputs, list_inputs(config.data))
    remove_unfinished(run)
    try:
        same = read_pieces(run.pieces).to_json() == pieces.to_json()
    except UserError:
        same = False
    if not same:
        run.tokenizer.unlink(missing_ok=True)
        shutil.rmtree(run.piece(0).parent, ignore_errors=True)
        pieces.write(run.pieces)
        for source in config.data:
            if source.dataset is not None:  # what it is today: its owner may put other text there
                found = hub_revision(source)
                run.event("dataset", dataset=source.dataset, wanted=source.revision, revision=found)
                say(f"dataset {source.dataset}: revision {found or 'not known'}")
    return pieces


def remove_unfinished(run: Run) -> None:
    """Remove what an attempt that was killed has begun to write; pieces, which are folders, see to their own."""
    for path in (*run.data.glob(".*.tmp"), *run.piece(0).parent.glob(".*.tmp")):
        if not path.is_dir():
            path.unlink(missing_ok=True)


def make_tokenizer(run: Run, config: Config, pieces: PieceList) -> None:
    """Make the Run's tokenizer: the one an earlier attempt made, a copy of the given one, or a new one."""
    if run.tokenizer.is_file():
        say(f"{run.tokenizer} is there already")
    elif config.tokenize.tokenizer is not None:
        copy_tokenizer(Path(config.tokenize.tokenizer), run.tokenizer, config.tokenize.vocab_size)
    else:
        learn_tokenizer(run, config, pieces)


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


def learn_tokenizer(run: Run, config: Config, pieces: PieceList) -> None:
    """Train on the train split only. All the text is read here, so what is wrong with it shows before the work.

    Of input that is larger by far than what the tokenizer needs, evenly spread pieces are read.
    """
    step = max(1, pieces.bytes // (SAMPLED * config.tokenize.training_bytes))
    chosen = list(range(0, len(pieces.pieces), step))
    watch = Watch("read", len(chosen))

    def draw(number: int) -> tuple[Sample, ReadCounts, dict[str, int]]:
        sample, counts = Sample(config.tokenize.training_bytes), ReadCounts()
        documents = dict.fromkeys(SPLITS, 0)
        for texts in read_piece(pieces.pieces[number], config.data, counts, watch.tell(number)):
            for text in texts:
                split = split_of(hashlib.sha256(text).digest(), config.tokenize.validation_fraction)
                documents[split] += 1
                if split == "train":
                    sample.add(text)
        return sample, counts, documents

    sample, documents = Sample(config.tokenize.training_bytes), dict.fromkeys(SPLITS, 0)
    for part, counts, found in in_processes(draw, chosen, processes_of(config)):
        sample.merge(part)
        documents = {split: number + found[split] for split, number in documents.items()}
        watch.add(counts)
    watch.end()
    check_counts(config, watch.counts, documents)
    say(f"training a {config.tokenize.model_type} tokenizer of {config.tokenize.vocab_size} tokens")
    train_on_sample(sample, config.tokenize, run.tokenizer)
    say(f"tokenizer trained: {sample}")


# -- the second phase: ids --------------------------------------------------------------------------------------------


def encode(run: Run, config: Config, pieces: PieceList, numbers: Sequence[int]) -> None:
    """Encode those of the pieces that are not there."""
    missing = [number for number in numbers if not run.piece(number).is_dir()]
    if len(missing) < len(numbers):
        say(f"{len(numbers) - len(missing)} of {len(numbers)} pieces are there already")
    if not missing:
        return
    encoder = Encoder(Tokenizer(run.tokenizer))  # each process has a copy, and keeps it
    watch = Watch("encoded", len(missing))

    def work(number: int) -> ReadCounts:
        pieces.check_unchanged(number)
        fraction, tell = config.tokenize.validation_fraction, watch.tell(number)
        return encode_piece(
            pieces.pieces[number], run.piece(number), config.data, encoder, fraction, tell=tell,
            before_publish=lambda: pieces.check_unchanged(number),
        )  # fmt: skip

    for counts in in_processes(work, missing, processes_of(config)):
        watch.add(counts)
        if config.tokenize.max_malformed_share == 0:  # else only the index phase knows the share
            counts.check_malformed(0)
    watch.end()


# -- the third phase: shards and index --------------------------------------------------------------------------------


def write_index(run: Run, config: Config, pieces: PieceList, inputs: str) -> None:
    """Put the pieces together; they are removed when the index is there.

    What an attempt that was killed has left: its finished shards stay, its unfinished ones give their room back.
    """
    missing = [number for number in range(len(pieces.pieces)) if not run.piece(number).is_dir()]
    if missing:
        raise NotReadyError(
            f"{run.data}: {len(missing)} of {len(pieces.pieces)} pieces are not encoded yet, the first is {missing[0]}"
        )
    remove_unfinished(run)
    tokenizer = Tokenizer(run.tokenizer)
    dtype = dtype_for(tokenizer.vocab_size)
    outputs = [PieceOutput(run.piece(number), dtype) for number in range(len(pieces.pieces))]
    counts = ReadCounts()
    documents = dict.fromkeys(SPLITS, 0)
    for output in outputs:
        counts.merge(output.counts())
        rows = output.documents()
        documents = {
            name: number + int((rows["split"] == at).sum()) for at, (name, number) in enumerate(documents.items())
        }
    check_counts(config, counts, documents)
    index = write_data(
        run.data, inputs, tokenizer, outputs, [piece[0].source for piece in pieces.pieces],
        made_from=f"{pieces.fingerprint} {tokenizer.fingerprint}", shard_tokens=config.tokenize.shard_tokens,
        drop_duplicates=config.tokenize.drop_duplicates, processes=processes_of(config), tell=ShardWatch().add,
        before_index=lambda: write_inputs(run, read_files(pieces, outputs)),
    )  # fmt: skip
    shutil.rmtree(run.piece(0).parent, ignore_errors=True)
    print_table(index)


def read_files(pieces: PieceList, outputs: Sequence[PieceOutput]) -> list[ReadFile]:
    """List the files that the pieces were made of, each with the hashes that were taken as it was read."""
    hashes: dict[str, list[HashedRange]] = {}
    for output in outputs:
        for path, start, end, digest in output.hashes():
            hashes.setdefault(path, []).append(HashedRange(start, end, digest))
    items = {item.path: item for item in pieces.inputs}
    read = dict.fromkeys((part.source, part.path) for piece in pieces.pieces for part in piece)  # each once, in order
    return [
        ReadFile(source, path, items[path].size, items[path].changed, tuple(dict.fromkeys(hashes.get(str(path), ()))))
        for source, path in read
        if path is not None
    ]


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


class Watch:
    """Say now and then how much of the input is done."""

    def __init__(self, verb: str, pieces: int) -> None:
        self.verb, self.pieces, self.done = verb, pieces, 0
        self.counts = ReadCounts()
        self.started = self.said = time.monotonic()

    def add(self, counts: ReadCounts) -> None:
        """Take in what one more piece held."""
        self.counts.merge(counts)
        self.done += 1
        if time.monotonic() - self.said > PROGRESS_SECONDS:
            self.said = time.monotonic()
            say(f"{self._progress(self.counts)} ({self.done} of {self.pieces} pieces)")

    def tell(self, number: int) -> Any:
        """Return what a piece calls as it is read, in whatever process; a long one is told of."""
        said = time.monotonic()

        def tell(counts: ReadCounts) -> None:
            nonlocal said
            if time.monotonic() - said > PIECE_SECONDS:
                said = time.monotonic()
                say(f"piece {number}: {counts.documents:,} documents, {counts.text_bytes / 1e6:.1f} MB so far")

        return tell

    def end(self) -> None:
        """Say what all pieces held."""
        if self.counts.empty_files:
            more = self.counts.empty_files
            say(f"warning: {len(more)} files have 0 bytes, the first is {more[0]}")
        say(f"{self._progress(self.counts)} ({self.counts})")

    def _progress(self, counts: ReadCounts) -> str:
        megabytes, seconds = counts.text_bytes / 1e6, max(time.monotonic() - self.started, 1e-6)
        return f"{self.verb} {counts.documents:,} documents, {megabytes:.1f} MB, {megabytes / seconds:.1f} MB/s"


class ShardWatch:
    """Say now and then how many shards are there, and which part of them was there before."""

    def __init__(self) -> None:
        self.done = self.found = 0
        self.said = time.monotonic()

    def add(self, written: Written, shards: int) -> None:
        """Take in one more of `shards`."""
        self.done += 1
        self.found += written.found
        if self.done == shards or time.monotonic() - self.said > PROGRESS_SECONDS:
            self.said = time.monotonic()
            before = f"; {self.found} were there already" if self.found else ""
            say(f"{self.done} of {shards} shards are there{before}")


def print_table(index: dict[str, Any]) -> None:
    """Print the statistics of the index, one column a split."""
    splits = index["splits"]
    print(f"{'':24}" + "".join(f"{name:>16}" for name in splits))
    keys = "documents duplicates bytes tokens bytes_per_token longest_document vocabulary_used".split()
    for key in keys:
        values = [splits[name][key] for name in splits]
        cells = [f"{value:.3f}" if isinstance(value, float) else f"{value:,}" for value in values]
        print(f"{key.replace('_', ' '):24}" + "".join(f"{cell:>16}" for cell in cells))
    print(f"{'shards':24}" + "".join(f"{len(splits[name]['shards']):>16,}" for name in splits))
    read, tokenizer = index["read"], index["tokenizer"]
    print(", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in read.items()))
    print(f"tokenizer {tokenizer['fingerprint'][:12]}: {tokenizer['vocab_size']:,} tokens, ids as {index['dtype']}")
    print(f"texts in both splits: {index['in_both_splits']:,}")


def main(run: Run, config: Config, attempt: Attempt) -> None:
    """Do the phase that the job script names."""
    task, _, tasks = os.environ.get("PIPELINE_TASK", "").partition("/")
    tokenize(run, config, os.environ.get("PIPELINE_PHASE", ""), int(task or 0), int(tasks or 1))


if __name__ == "__main__":
    sys.exit(run_stage("tokenize", main))
