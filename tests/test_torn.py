"""A record that is cut, empty or no JSON is a message, whoever reads it: never a traceback, never a silent new start."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from example_run import MAX_STEPS, make_run
from test_tokenize_stage import config, write_lines
from test_tokenizer import corpus

from pipeline.config.load import load_run_config
from pipeline.errors import EXIT_STORAGE, UserError
from pipeline.evaluation.release import promote
from pipeline.files import TornError, read_json, read_object
from pipeline.image.build import is_complete as image_is_complete
from pipeline.image.check import record_path
from pipeline.inference.exporting import step_of
from pipeline.lm.hardware import start_hardware
from pipeline.report.write import write_report
from pipeline.run.complete import check_state, is_complete
from pipeline.run.folder import Run
from pipeline.screen import Screen
from pipeline.stages.tokenize import tokenize
from pipeline.status.read import read_status
from pipeline.status.view import print_status
from pipeline.submit.run_folder import image_of, read_jobs

STAGES = ("tokenize", "pretrain", "evaluate", "inference")
SPOILS = [b"", b'{"a": [1, ', b"\xff\xfe", b"[]", b"17", b"[" * 100_000]


def look(run: Run) -> None:
    print_status(read_status(run), Screen(file=io.StringIO()))


def complete(run: Run) -> None:
    wanted = load_run_config(run.config)
    for stage in STAGES:
        is_complete(run, wanted, stage)
    check_state(run, wanted, STAGES)


READERS: dict[str, Callable[[Run], object]] = {
    "status": look,
    "report": write_report,
    "complete": complete,
    "jobs": read_jobs,
    "image": lambda run: image_of(run, None),
    "hardware": lambda run: start_hardware(load_run_config(run.config), run.record),
    "promote": lambda run: promote(run, MAX_STEPS, "why"),
    "export": lambda run: step_of(run, None),
}
RECORDS: dict[str, Callable[[Run], Path]] = {
    "run.json": lambda run: run.record,
    "jobs.json": lambda run: run.jobs,
    "index.json": lambda run: run.index,
    "inputs.json": lambda run: run.inputs,
    "inputs seen": lambda run: run.inputs_seen,
    "pieces.json": lambda run: run.pieces,
    "manifest": lambda run: run.checkpoint(MAX_STEPS) / "manifest.json",
    "score": lambda run: run.score(MAX_STEPS, "bits_per_byte"),
    "compressors": lambda run: run.compressors,
    "samples": lambda run: run.samples(MAX_STEPS),
    "record of samples": lambda run: run.samples_record(MAX_STEPS),
    "metrics": lambda run: run.metrics,
    "events": lambda run: run.events,
    "verdict": lambda run: run.verdict("2", 0),
    "ledger": lambda run: run.ledger("2", 0),
    "beginning": lambda run: run.beginning("2", 0),
    "owner": lambda run: run.owner,
    "released": lambda run: run.released,
    "plan": lambda run: run.plan,
}


@pytest.mark.parametrize("reader", READERS)
def test_whatever_is_torn_is_a_message_or_nothing(tmp_path: Path, reader: str) -> None:
    for name, record in RECORDS.items():
        for number, spoilt in enumerate(SPOILS):
            run = make_run(tmp_path / f"{name.replace(' ', '-')}-{number}")
            run.control.mkdir(exist_ok=True)
            path = record(run)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(spoilt)
            try:
                READERS[reader](run)
            except UserError as error:
                assert str(path) in str(error), f"{reader} of {name}"


def test_a_torn_record_is_told_with_its_size_and_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.touch()
    with pytest.raises(
        TornError, match=r"run\.json: holds 0 bytes that are no whole JSON: .* Put a whole copy"
    ) as caught:
        read_json(path)
    assert caught.value.exit_code == EXIT_STORAGE
    path.write_text("[]")
    with pytest.raises(TornError, match="a JSON list where an object belongs"):
        read_object(path)
    path.unlink()
    assert (read_json(path), read_object(path)) == (None, {})


def test_evaluate_is_not_complete_with_torn_compressors(tmp_path: Path) -> None:
    run = make_run(tmp_path / "made")
    run.compressors.write_text("")
    assert not is_complete(run, load_run_config(run.config), "evaluate")


def test_a_torn_list_of_pieces_is_made_anew(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    wanted = config(write_lines(tmp_path / "text.jsonl", corpus(40)))
    tokenize(run, wanted, "tokenizer")
    run.pieces.write_text(run.pieces.read_text()[:40])
    with pytest.raises(UserError, match="not a list of pieces"):
        tokenize(run, wanted, "encode")
    tokenize(run, wanted)
    assert run.index.is_file()


def test_a_piece_that_lost_its_counts_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    wanted = config(write_lines(tmp_path / "text.jsonl", corpus(40)))
    tokenize(run, wanted, "tokenizer")
    tokenize(run, wanted, "encode")
    for spoilt in ("", '{"x": 1}', "[]"):
        (run.piece(0) / "counts.json").write_text(spoilt)
        with pytest.raises(UserError, match=r"pieces/00000/counts\.json"):
            tokenize(run, wanted, "index")


def test_an_image_whose_record_is_torn_is_built_again(tmp_path: Path) -> None:
    image = tmp_path / "x.sqsh"
    image.write_text("image")
    record_path(image).write_text("")
    assert not image_is_complete(image)
    record_path(image).write_text(json.dumps({"size": 5}))
    assert image_is_complete(image)
