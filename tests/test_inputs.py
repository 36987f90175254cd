"""Completeness compares what outputs were made of with what is there now; digests outlive a new key of the schema."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from example_run import MAX_STEPS, make_run
from test_tokenize_stage import config, hashes, write_lines
from test_tokenizer import corpus

from pipeline.config.evaluate import BenchmarkSource
from pipeline.config.inference import InferenceConfig
from pipeline.config.load import load_run_config
from pipeline.config.schema import Config
from pipeline.config.tokenize import DataSource, TokenizeConfig
from pipeline.errors import NotReadyError, UserError
from pipeline.evaluation.scoring import describe_source, is_scored
from pipeline.files import read_json, write_json
from pipeline.inference.samples import settings_digest
from pipeline.lm import pieces
from pipeline.lm.origin import changes
from pipeline.run import inputs
from pipeline.run.complete import Completeness, check_state, completeness, is_complete
from pipeline.run.folder import Run
from pipeline.run.inputs import changed_inputs, check_inputs, fingerprint, read_inputs
from pipeline.stages.tokenize import tokenize

TEXT = corpus(40)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of text in two files."""
    (tmp_path / "text").mkdir()
    write_lines(tmp_path / "text" / "a.jsonl", TEXT[:20])
    write_lines(tmp_path / "text" / "b.jsonl", TEXT[20:])
    return tmp_path / "text"


@pytest.fixture
def run(tmp_path: Path, folder: Path) -> Run:
    run = Run(tmp_path / "run")
    run.control.mkdir(parents=True)
    tokenize(run, config(folder))
    return run


def later(path: Path) -> None:
    """Give a file another time."""
    os.utime(path, ns=(1, 1_700_000_000_000_000_000))


def change(path: Path) -> None:
    """Change one letter and nothing of the size."""
    content = bytearray(path.read_bytes())
    content[30] = ord("x") if content[30] != ord("x") else ord("y")
    path.write_bytes(content)


def test_tokens_of_the_text_as_it_is_are_complete(run: Run, folder: Path) -> None:
    assert changed_inputs(run, config(folder)) == []
    assert is_complete(run, config(folder), "tokenize")


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda folder: write_lines(folder / "c.jsonl", TEXT[:1]), "c.jsonl is new"),
        (lambda folder: (folder / "b.jsonl").unlink(), "b.jsonl is gone"),
        (lambda folder: write_lines(folder / "b.jsonl", TEXT), "bytes, and had"),
        (lambda folder: change(folder / "a.jsonl"), "a.jsonl has other bytes"),
    ],
)
def test_changed_text_makes_tokens_stale_and_they_are_made_anew(
    run: Run, folder: Path, capsys: pytest.CaptureFixture[str], act: Any, said: str
) -> None:
    before = hashes(run)
    act(folder)
    (difference,) = changed_inputs(run, config(folder))
    assert said in difference
    assert not is_complete(run, config(folder), "tokenize")
    check_inputs(run, config(folder))  # no model is trained on them yet
    tokenize(run, config(folder))
    assert "the text has changed since" in capsys.readouterr().err
    assert hashes(run) != before
    assert is_complete(run, config(folder), "tokenize")


def test_another_time_alone_is_hashed_once(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in folder.iterdir():
        later(path)
    assert is_complete(run, config(folder), "tokenize")
    monkeypatch.setattr(inputs, "hash_range", None)
    assert is_complete(run, config(folder), "tokenize")
    later_still = next(folder.iterdir())
    os.utime(later_still, ns=(1, 1))
    with pytest.raises(TypeError):
        is_complete(run, config(folder), "tokenize")


def test_a_long_file_is_hashed_by_its_ranges(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SMALLEST", 3000)
    run = Run(tmp_path / "cut")
    run.control.mkdir(parents=True)
    tokenize(run, config(folder))
    assert max(len(file.hashes) for file in read_inputs(run)) > 1
    later(folder / "a.jsonl")
    assert changed_inputs(run, config(folder)) == []
    change(folder / "a.jsonl")
    assert changed_inputs(run, config(folder)) == [f"{folder / 'a.jsonl'} has other bytes"]


def test_text_that_was_removed_after_its_use_is_not_missed(run: Run, folder: Path) -> None:
    shutil.rmtree(folder)
    assert is_complete(run, config(folder), "tokenize")


def test_tokens_of_an_older_version_are_compared_by_names_and_sizes(run: Run, folder: Path) -> None:
    run.inputs.unlink()
    later(folder / "a.jsonl")
    assert is_complete(run, config(folder), "tokenize")
    write_lines(folder / "b.jsonl", TEXT)
    assert not is_complete(run, config(folder), "tokenize")


def test_a_file_in_two_sources_is_both(tmp_path: Path, folder: Path) -> None:
    both = config(folder).model_copy(
        update={"data": [DataSource(path=str(folder)), DataSource(path=str(folder / "a.jsonl"))]}
    )
    run = Run(tmp_path / "both")
    run.control.mkdir(parents=True)
    tokenize(run, both)
    assert changed_inputs(run, both) == []
    run.inputs.unlink()
    assert changed_inputs(run, both) == []


def test_another_tokenizer_file_makes_tokens_stale(tmp_path: Path, run: Run, folder: Path) -> None:
    given = Path(shutil.copy(run.tokenizer, tmp_path / "given.model"))
    wanted = config(folder, tokenizer=str(given))
    other = Run(tmp_path / "other")
    other.control.mkdir(parents=True)
    tokenize(other, wanted)
    assert is_complete(other, wanted, "tokenize")
    given.write_bytes(given.read_bytes() + b"x")
    assert changed_inputs(other, wanted) == [f"{given} (tokenize.tokenizer) is another one"]


def test_a_model_binds_its_tokens_and_a_person_is_told(run: Run, folder: Path) -> None:
    run.checkpoint(0).mkdir(parents=True)
    before = hashes(run)
    write_lines(folder / "b.jsonl", TEXT)
    with pytest.raises(UserError, match=r"the text has changed .*b.jsonl has .* take a new name") as caught:
        check_inputs(run, config(folder))
    tokenize(run, config(folder))  # a Job that is under way changes nothing
    assert hashes(run) == before
    assert is_complete(run, config(folder), "tokenize")
    assert f"touch {run.keep_tokens}" in str(caught.value)
    run.keep_tokens.touch()
    check_inputs(run, config(folder))


def test_a_torn_record_of_inputs_is_a_message(run: Run, folder: Path) -> None:
    run.inputs.write_text("")
    with pytest.raises(UserError, match=r"inputs.json: holds 0 bytes that are no whole JSON"):
        changed_inputs(run, config(folder))
    run.inputs.write_text('{"files": [[1]]}')
    with pytest.raises(UserError, match="not a list of inputs"):
        changed_inputs(run, config(folder))


# The stages after it


@pytest.fixture
def made(tmp_path: Path) -> tuple[Run, Config]:
    run = make_run(tmp_path / "made")
    return run, load_run_config(run.config)


def test_a_model_of_another_vocabulary_or_of_other_tokens_is_not_complete(made: tuple[Run, Config]) -> None:
    run, wanted = made
    index, manifest = read_json(run.index), run.checkpoint(MAX_STEPS) / "manifest.json"
    write_json(manifest, {"step": MAX_STEPS, "tokenizer": index["tokenizer"]["fingerprint"]})
    assert all(is_complete(run, wanted, stage) for stage in ("tokenize", "pretrain", "evaluate", "inference"))
    write_json(manifest, {"step": MAX_STEPS, "tokenizer": "another"})
    assert not any(is_complete(run, wanted, stage) for stage in ("pretrain", "evaluate", "inference"))
    write_json(manifest, {"step": MAX_STEPS, "tokens": "others"})
    assert not is_complete(run, wanted, "pretrain")


def test_a_tokenizer_that_is_not_the_indexs_or_configs_is_not_complete(made: tuple[Run, Config]) -> None:
    run, wanted = made
    more = wanted.model_copy(update={"tokenize": TokenizeConfig(vocab_size=5000)})
    assert not is_complete(run, more, "tokenize")
    run.tokenizer.write_text("another model")
    assert not is_complete(run, wanted, "tokenize")


def test_samples_of_other_weights_are_not_complete(made: tuple[Run, Config]) -> None:
    run, wanted = made
    write_json(run.checkpoint(MAX_STEPS) / "manifest.json", {"step": MAX_STEPS, "sha256": "new"})
    write_json(run.samples_record(MAX_STEPS), {"settings": settings_digest(wanted.inference), "checkpoint": "new"})
    assert is_complete(run, wanted, "inference")
    write_json(run.samples_record(MAX_STEPS), {"settings": settings_digest(wanted.inference), "checkpoint": "old"})
    assert not is_complete(run, wanted, "inference")


def test_scores_of_other_questions_do_not_count(made: tuple[Run, Config], tmp_path: Path) -> None:
    run, _ = made
    path = tmp_path / "mine.jsonl"
    path.write_text("{}\n")
    benchmark = BenchmarkSource(name="mine", kind="cloze", path=str(path))
    record = {"score": 1.0, "benchmark": "mine"}
    write_json(run.score(MAX_STEPS, "mine"), record)
    assert is_scored(run, MAX_STEPS, benchmark)  # of an older version, which did not say
    write_json(run.score(MAX_STEPS, "mine"), record | describe_source(benchmark))
    assert is_scored(run, MAX_STEPS, benchmark)
    assert not is_scored(run, MAX_STEPS, benchmark.model_copy(update={"kind": "multiple_choice"}))
    path.write_text("{}\n{}\n")
    assert not is_scored(run, MAX_STEPS, benchmark)
    path.unlink()
    assert is_scored(run, MAX_STEPS, benchmark)


def test_nothing_ever_is_another_answer_than_all_is_done(made: tuple[Run, Config], tmp_path: Path) -> None:
    run, wanted = made
    assert completeness(run, wanted, "evaluate") is Completeness.COMPLETE
    new = Run(tmp_path / "new")
    for stage in ("evaluate", "inference"):
        assert completeness(new, wanted, stage) is Completeness.NOTHING
        with pytest.raises(NotReadyError, match="no checkpoint is there yet"):
            check_state(new, wanted, [stage])
    assert completeness(new, wanted, "tokenize") is Completeness.TO_DO
    check_state(new, wanted, ["tokenize", "pretrain", "evaluate", "inference"])


# Digests


def with_new_keys(section: Any) -> Any:
    """Return the section as a later version's schema has it."""
    kind = type(
        "Later", (type(section),), {"__annotations__": {"later": int, "listed": list[str]}, "later": 3, "listed": []}
    )
    return kind.model_validate(section.model_dump())


def test_digests_are_those_of_the_first_version() -> None:
    """Changing these makes all samples and tokens of all Runs stale."""
    first = Config.model_validate({"name": "x", "data": ["/a/b.txt", "hf:owner/name"]})
    assert settings_digest(first.inference) == "a61b632f0795230d"
    assert fingerprint(first) == "f4343e72f40096fdc01e3f576ce80a0264c9da358613a3a043e47c4efbad29ea"
    changed = Config.model_validate(
        {
            "name": "x",
            "data": ["/a/b.txt"],
            "tokenize": {"drop_duplicates": False, "vocab_size": 500},
            "inference": {"prompts": ["a", "b"], "stop": ["x"], "temperature": 0},
        }
    )
    assert settings_digest(changed.inference) == "f9a4d67c049813e8"
    assert fingerprint(changed) == "e5fc09ff273ac2412031c44005fd3e9872ba6d83cbdaaa8333065913c43c96f7"


def test_a_new_key_with_its_default_changes_no_digest() -> None:
    section = InferenceConfig(temperature=0.5)
    later = with_new_keys(section)
    assert settings_digest(later) == settings_digest(section)
    assert settings_digest(later.model_copy(update={"later": 4})) != settings_digest(section)
    old = Config(name="x")
    new = old.model_copy(update={"tokenize": with_new_keys(old.tokenize), "data": [with_new_keys(old.data[0])]})
    assert fingerprint(new) == fingerprint(old)
    assert fingerprint(new.model_copy(update={"data": [new.data[0].model_copy(update={"later": 9})]})) != fingerprint(
        old
    )


def test_a_new_key_with_its_default_is_no_change_since_a_checkpoint() -> None:
    now = {"config": Config(name="x").model_dump(mode="json", include={"seed", "model", "pretrain"})}
    then = json.loads(json.dumps(now))
    del then["config"]["pretrain"]["straggler_threshold"], then["config"]["model"]["qk_norm"]
    assert changes(Path("step-00000005"), then, now) == []
    now["config"]["pretrain"]["straggler_threshold"] = 0.9
    (told,) = changes(Path("step-00000005"), then, now)
    assert told.startswith("pretrain.straggler_threshold: ")
    assert told.endswith(" -> 0.9")
