"""The tokenize stage: the same bytes however often it is interrupted, and clear words where the text does not do."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from test_tokenizer import corpus

from pipeline.config.schema import Config
from pipeline.errors import NotReadyError, UserError
from pipeline.files import sha256_file
from pipeline.lm import pieces
from pipeline.lm.encoder import Encoder
from pipeline.lm.processes import LostProcessError
from pipeline.lm.shards import TokenShards
from pipeline.lm.tokenizer import Tokenizer
from pipeline.run.folder import Run
from pipeline.stages.tokenize import tokenize

OUTPUTS = ("*.bin", "*.model", "index.json")


def write_lines(path: Path, texts: list[bytes]) -> Path:
    path.write_text("".join(json.dumps({"text": text.decode()}) + "\n" for text in texts))
    return path


def config(*paths: Path | str, **values: object) -> Config:
    section = {"vocab_size": 310, "validation_fraction": 0.1, "shard_tokens": 3000, **values}
    return Config.model_validate(
        {"name": "test", "data": [{"path": str(path)} for path in paths], "tokenize": section, "threads": 1}
    )


def hashes(run: Run) -> dict[str, str]:
    return {path.name: sha256_file(path) for pattern in OUTPUTS for path in run.data.glob(pattern)}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "text.jsonl", corpus(60))


def test_documents_duplicates_and_empties(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = corpus(60)
    path = write_lines(tmp_path / "text.jsonl", [*texts, texts[0], b"", b" \n", b"b </s> c"])
    run = Run(tmp_path / "run")
    tokenize(run, config(path))
    index = run.read_index()
    assert index is not None
    train, validation = index["splits"]["train"], index["splits"]["validation"]
    assert train["documents"] + validation["documents"] == 61
    assert train["duplicates"] + validation["duplicates"] == 1
    assert index["read"] == {"files": 1, "records": 64, "empty": 2, "malformed": 0, "blank_lines": 0}
    assert train["bytes"] + validation["bytes"] == sum(map(len, texts)) + len(b"b </s> c")
    assert index["tokenizer"] == {
        "fingerprint": sha256_file(run.tokenizer), "vocab_size": 310, "eos_id": 1, "exact": True,
    }  # fmt: skip
    out = capsys.readouterr()
    assert "documents" in out.out
    assert "tokenizer trained: " in out.err


def test_the_shards_hold_the_text_and_no_document_is_in_both_splits(tmp_path: Path, text: Path) -> None:
    run = Run(tmp_path / "run")
    tokenize(run, config(text))
    tokenizer = Tokenizer(run.tokenizer)
    found = {}
    for split in ("train", "validation"):
        shards = TokenShards(run.data, split)
        shards.verify()
        ids = np.concatenate(list(shards))
        documents = np.split(ids, np.flatnonzero(ids == tokenizer.eos_id) + 1)[:-1]
        found[split] = {tokenizer.decode(document).encode() for document in documents}
    assert found["train"] | found["validation"] == set(corpus(60))
    assert not found["train"] & found["validation"]
    assert len(TokenShards(run.data, "train")) > 1


def test_more_text_moves_no_document_to_the_other_split(tmp_path: Path) -> None:
    splits = []
    for number in (60, 90):
        run = Run(tmp_path / f"run{number}")
        tokenize(run, config(write_lines(tmp_path / f"{number}.jsonl", corpus(number)), shard_tokens=10**6))
        shards = TokenShards(run.data, "validation")
        documents = Tokenizer(run.tokenizer).decode(shards[0]).encode()
        splits.append({text for text in corpus(60) if text in documents})
    assert splits[0] == splits[1]


def test_complete_data_is_left_alone(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path / "run")
    tokenize(run, config(text))
    before = {path: path.stat().st_mtime_ns for path in run.data.iterdir()}
    text.unlink()  # the data no longer needs it
    tokenize(run, config(text, time="2:00:00", max_malformed_share=0.5))
    assert "is complete: nothing to do" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in run.data.iterdir()} == before


def test_complete_data_of_another_config_is_refused(tmp_path: Path, text: Path) -> None:
    run = Run(tmp_path / "run")
    tokenize(run, config(text))
    with pytest.raises(UserError, match="other data: or tokenize: settings"):
        tokenize(run, config(text, vocab_size=311))


def test_a_lost_shard_is_named(tmp_path: Path, text: Path) -> None:
    run = Run(tmp_path / "run")
    tokenize(run, config(text))
    (run.data / "train-00001.bin").unlink()
    with pytest.raises(UserError, match=r"train-00001\.bin.*remove .*index\.json and run tokenize"):
        tokenize(run, config(text))


def test_an_interrupted_attempt_keeps_its_tokenizer_unless_the_text_changed(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "run")
    tokenize(run, config(text))
    whole = hashes(run)
    run.index.unlink()
    capsys.readouterr()
    tokenize(run, config(text))
    assert "is there already" in capsys.readouterr().err
    assert hashes(run) == whole
    run.index.unlink()
    write_lines(text, corpus(70))
    tokenize(run, config(text))
    assert "tokenizer trained" in capsys.readouterr().err
    assert hashes(run)["tokenizer.model"] != whole["tokenizer.model"]


def test_the_work_may_be_shared_out_in_any_way(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, shared, forked = Run(tmp_path / "whole"), Run(tmp_path / "shared"), Run(tmp_path / "forked")
    tokenize(whole, config(text))  # one piece
    monkeypatch.setattr(pieces, "SMALLEST", 5000)
    tokenize(shared, config(text), "tokenizer")
    with pytest.raises(NotReadyError, match=r"of \d+ pieces are not encoded yet, the first is 0"):
        tokenize(shared, config(text), "index")
    for task in (5, 1, 0, 4, 2, 3, 3):
        tokenize(shared, config(text), "encode", task, 6)
    assert len(list((shared.data / "pieces").iterdir())) > 6
    tokenize(shared, config(text), "index")
    tokenize(forked, config(text, processes=3))
    assert hashes(shared) == hashes(forked) == hashes(whole)
    assert not (shared.data / "pieces").exists()


def test_a_task_before_the_first_phase_says_so(tmp_path: Path, text: Path) -> None:
    with pytest.raises(NotReadyError, match="not listed yet: run tokenize from its beginning"):
        tokenize(Run(tmp_path / "run"), config(text), "encode", 0, 2)


def test_a_process_that_is_killed_is_told_and_its_piece_done_again(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "SMALLEST", 5000)
    run = Run(tmp_path / "run")
    tokenize(run, config(text), "tokenizer")
    parent, encode = os.getpid(), Encoder.encode
    monkeypatch.setattr(
        Encoder,
        "encode",
        lambda *words: os.kill(os.getpid(), signal.SIGKILL) if os.getpid() != parent else None,
    )
    with pytest.raises(LostProcessError, match="killed by SIGKILL .*ran out of memory"):
        tokenize(run, config(text, processes=2), "encode")
    monkeypatch.setattr(Encoder, "encode", encode)
    tokenize(run, config(text, processes=2))
    whole = Run(tmp_path / "whole")
    tokenize(whole, config(text))
    assert hashes(run) == hashes(whole)


PROGRAM = """
import sys
from pipeline.lm import pieces
from pipeline.lm.encoder import Encoder
pieces.SMALLEST = 50_000
from pathlib import Path
from pipeline.config.schema import Config
from pipeline.run.folder import Run
from pipeline.stages.tokenize import tokenize
tokenize(Run(Path(sys.argv[1])), Config.model_validate_json(sys.argv[2]))
"""


def test_kills_at_any_time_leave_the_same_bytes(tmp_path: Path) -> None:
    wanted = config(write_lines(tmp_path / "text.jsonl", corpus(700)), vocab_size=316, shard_tokens=20_000, processes=2)
    whole = Run(tmp_path / "whole")
    command = [sys.executable, "-c", PROGRAM]
    started = time.monotonic()
    subprocess.run([*command, str(whole.root), wanted.model_dump_json()], check=True, capture_output=True)
    seconds = time.monotonic() - started
    generator = random.Random(0)
    killed = Run(tmp_path / "killed")
    for _ in range(3):
        process = subprocess.Popen(
            [*command, str(killed.root), wanted.model_dump_json()], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(seconds * generator.uniform(0.3, 1.0))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    tokenize(killed, wanted)
    assert hashes(killed) == hashes(whole)
    assert not list(killed.data.glob(".*"))


# -- text that does not do --------------------------------------------------------------------------------------------


def test_malformed_lines_stop_before_the_tokenizer_is_trained(tmp_path: Path, text: Path) -> None:
    with text.open("ab") as file:
        file.write(b"broken\n")
    run = Run(tmp_path / "run")
    with pytest.raises(UserError, match=r"(?s)1 of 61 records .*max_malformed_share.*text\.jsonl:61: not JSON"):
        tokenize(run, config(text))
    assert not hashes(run)
    tokenize(run, config(text, max_malformed_share=0.02))
    index = run.read_index()
    assert index is not None
    assert index["read"]["malformed"] == 1


@pytest.mark.parametrize("files", [{"a.txt": b""}, {"a.txt": b"\n" * 1000, "b.jsonl": b""}])
def test_no_text_is_too_little_data(tmp_path: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=rf"too little data: 0 documents with text \({len(files)} files, .* empty"):
        tokenize(Run(tmp_path / "run"), config(tmp_path))


@pytest.mark.parametrize(("texts", "documents"), [([b"one document " * 100], 1), ([b"the same " * 100] * 50, 50)])
def test_one_document_or_only_duplicates_are_too_little_data(
    tmp_path: Path, texts: list[bytes], documents: int
) -> None:
    path = write_lines(tmp_path / "text.jsonl", texts)
    with pytest.raises(UserError, match=rf"split is empty: 0 of {documents} documents.*validation_fraction 0\.1"):
        tokenize(Run(tmp_path / "run"), config(path))


def test_one_repeated_character_is_too_little_data(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "text.jsonl", [b"a" * length for length in range(1, 200)])
    with pytest.raises(UserError, match=r"vocab_size: 1000 is too high: .* give at most \d+"):
        tokenize(Run(tmp_path / "run"), config(path, vocab_size=1000))


def test_a_cut_file_publishes_nothing(tmp_path: Path) -> None:
    import gzip

    lines = write_lines(tmp_path / "all", corpus(60)).read_bytes()
    path = tmp_path / "text.jsonl.gz"
    path.write_bytes(gzip.compress(lines)[:-40])
    run = Run(tmp_path / "run")
    with pytest.raises(UserError, match=r"text\.jsonl\.gz: can't be read to its end"):
        tokenize(run, config(path))
    assert not hashes(run)


# -- a tokenizer from elsewhere ---------------------------------------------------------------------------------------


def test_an_existing_tokenizer_is_copied(tmp_path: Path, text: Path) -> None:
    first, second = Run(tmp_path / "first"), Run(tmp_path / "second")
    tokenize(first, config(text))
    tokenize(second, config(text, tokenizer=str(first.tokenizer)))
    a, b = hashes(first), hashes(second)
    assert {**a, "index.json": ""} == {**b, "index.json": ""}


def test_an_existing_tokenizer_must_have_the_vocabulary_of_the_config(tmp_path: Path, text: Path) -> None:
    first = Run(tmp_path / "first")
    tokenize(first, config(text))
    with pytest.raises(UserError, match=r"vocab_size is 4096, but .* has 310 tokens: write tokenize\.vocab_size: 310"):
        tokenize(Run(tmp_path / "run"), config(text, tokenizer=str(first.tokenizer), vocab_size=4096))
