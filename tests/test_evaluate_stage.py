"""The evaluate stage: the same Scores however the work is cut and interrupted, exact sums, and it leaves in time."""

from __future__ import annotations

import json
import math
import shutil
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_tokenize_stage import write_lines
from test_tokenizer import corpus

from pipeline.config.schema import Config
from pipeline.errors import NotReadyError, UserError
from pipeline.evaluation.questions import Question, read_questions
from pipeline.evaluation.scoring import is_scored
from pipeline.files import read_json, read_lines, write_json, write_text
from pipeline.lm.batches import ValidationText
from pipeline.lm.checkpoint import remove_old
from pipeline.lm.contents import seal
from pipeline.lm.evaluation import TextTask
from pipeline.lm.hardware import Hardware
from pipeline.lm.harness import HarnessTask, folder_digest
from pipeline.lm.model import Transformer
from pipeline.lm.optim import build_optimizers
from pipeline.lm.questions import QuestionTask
from pipeline.lm.saver import Saver
from pipeline.lm.tokenizer import Tokenizer
from pipeline.run.folder import Run
from pipeline.stages.early import Stopped
from pipeline.stages.evaluate import Evaluation, evaluate
from pipeline.stages.main import Attempt
from pipeline.stages.tokenize import tokenize

STEPS = (0, 5)
HARDWARE = Hardware(device="cpu", precision="fp32", compile=False, threads=1)
ATTEMPT = Attempt("evaluate", "7", 0, rank=0)


def config(**evaluate: Any) -> Config:
    return Config.model_validate(
        {
            "name": "run",
            "threads": 1,
            "tokenize": {"vocab_size": 310, "validation_fraction": 0.4},
            "model": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
            "pretrain": {"sequence_length": 16, "max_steps": STEPS[-1]},
            "evaluate": {"checkpoints": ["all"], "batch_size": 48, **evaluate},
        }
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A Run with tokens and two checkpoints of random weights."""
    run = Run(tmp_path_factory.mktemp("evaluate") / "run")
    text = write_lines(run.root.parent / "text.jsonl", corpus(40))
    tokenize(
        run, config().model_copy(update={"data": [Config.model_validate({"name": "x", "data": str(text)}).data[0]]})
    )
    write_text(run.config, "name: run\n")
    for step in STEPS:
        torch.manual_seed(step)
        model = Transformer(config().model, 310, 16)
        model.init_weights(step)
        with Saver(run.checkpoints, {}) as saver:
            saver.save(step, model, build_optimizers(model, config().pretrain), {"step": step})
    return run


@pytest.fixture
def run(made: Run, tmp_path: Path) -> Run:
    """A copy of it, with no Scores yet."""
    shutil.copytree(made.root, tmp_path / "run")
    return Run(tmp_path / "run")


def scores(run: Run, benchmark: str = "bits_per_byte") -> list[dict[str, Any]]:
    dull = ("seconds", "units")
    return [{k: v for k, v in read_json(run.score(step, benchmark)).items() if k not in dull} for step in STEPS]


def test_scores_do_not_depend_on_the_cutting(run: Run, tmp_path: Path) -> None:
    other = Run(shutil.copytree(run.root, tmp_path / "other"))
    path = tmp_path / "questions.jsonl"
    choices = [" a", " bb", " cc d"]
    lines = [json.dumps({"context": "x" * at, "choices": choices, "answer": at % 3}) for at in range(40)]
    path.write_text("\n".join(lines))
    both = ["bits_per_byte", {"name": "mine", "path": str(path)}]
    evaluate(run, config(benchmarks=both), ATTEMPT)
    write_text(other.metrics, json.dumps({"step": 1, "tokens_per_s": 100.0}) + "\n")  # so slow that a batch is a Unit
    evaluate(other, config(benchmarks=both, unit_seconds=0.001), ATTEMPT)
    units = [read_json(r.score(0, "bits_per_byte"))["units"] for r in (run, other)]
    assert units[1] == read_json(other.score(0, "bits_per_byte"))["batches"] > units[0]
    for benchmark in ("bits_per_byte", "mine"):
        assert scores(run, benchmark) == scores(other, benchmark)


def test_bits_per_byte_are_those_of_every_token_once(run: Run) -> None:
    """Against a plain loop: each token from a window of its own, so padding and batches have no say."""
    tokenizer = Tokenizer(run.tokenizer)
    ids = np.concatenate([tokenizer.encode_documents([text], 1)[0] for text in corpus(3)]).astype(np.int64)
    model = Transformer(config().model, 310, 16)
    model.init_weights(1)
    task = TextTask(ValidationText(ids, 100, b""), bos=tokenizer.eos_id, size=16, stride=4, batch_size=3)
    values = task.score(model, HARDWARE, range(task.batches), lambda: None)
    assert sum(values["tokens"]) == len(ids)
    inputs, total = [tokenizer.eos_id, *ids[:-1].tolist()], 0.0
    with torch.inference_mode():
        for start, scored, end in task.spans:
            logits = model(torch.tensor([inputs[start:end]]))[0].double().log_softmax(-1)
            total -= sum(logits[at - start, ids[at]].item() for at in range(scored, end))
    assert math.fsum(values["nll"]) == pytest.approx(total, rel=1e-6)


def test_a_killed_job_costs_one_unit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    small = config(unit_seconds=0.001)
    write_text(run.metrics, json.dumps({"step": 1, "tokens_per_s": 100.0}) + "\n")
    calls = []

    def stop_at_the_third(*_: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise Stopped("time is up")

    monkeypatch.setattr("pipeline.stages.evaluate.poll", stop_at_the_third)
    with pytest.raises(Stopped):
        evaluate(run, small, ATTEMPT)
    folder = run.slices(0, "bits_per_byte")
    done = sorted(path.name for path in folder.glob("[0-9]*.json"))
    assert done == ["0000.json", "0001.json"]
    assert not list(folder.glob(".*claim*"))
    times = {name: (folder / name).stat().st_mtime_ns for name in done}
    monkeypatch.undo()
    evaluate(run, small, Attempt("evaluate", "8", 0, rank=0))
    assert {name: (folder / name).stat().st_mtime_ns for name in done} == times
    assert len(scores(run)) == 2


def test_it_takes_no_unit_that_does_not_fit_into_its_time(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    write_text(run.metrics, json.dumps({"step": 1, "tokens_per_s": 1.0}) + "\n")  # a batch takes 256 s
    begin = {"stage": "evaluate", "deadline": time.time() + 60, "dead": []}
    write_json(run.beginning("7", 0), begin)
    evaluate(run, config(), ATTEMPT)
    assert "leaves in time" in capsys.readouterr().out
    assert not list(run.root.glob("scores/*/*/[0-9]*.json"))


def test_units_of_a_living_job_are_left_to_it(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(run.beginning("7", 0), {"stage": "evaluate", "deadline": None, "dead": ["6.0"]})
    claim = {"host": "elsewhere", "pid": 1, "job_id": "5", "attempt": 0}
    folders = [run.slices(step, "bits_per_byte") for step in STEPS]
    write_json(folders[0] / ".0000.claim.000001", claim)
    write_json(folders[1] / ".0000.claim.000001", claim | {"job_id": "6"})
    evaluate(run, config(), ATTEMPT)
    assert "step 0: other Jobs work on the rest of bits_per_byte" in capsys.readouterr().out
    assert [run.score(step, "bits_per_byte").is_file() for step in STEPS] == [False, True]


def test_a_checkpoint_that_retention_took_is_passed_over(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of steps is older than the deletion."""
    monkeypatch.setattr("pipeline.stages.evaluate.steps_to_evaluate", lambda run, config: [0, 3, 5])
    evaluate(run, config(), ATTEMPT)
    assert len(scores(run)) == 2


def test_where_all_checkpoints_went_away_it_does_not_say_that_all_is_done(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.stages.evaluate.steps_to_evaluate", lambda run, config: [3])
    with pytest.raises(NotReadyError, match="went away"):
        evaluate(run, config(), ATTEMPT)
    (event,) = [event for event in read_lines(run.events) if event["event"] == "not scored"]
    assert event["step"] == 3


def add_checkpoint(run: Run, step: int) -> None:
    """Add the weights of step 5 under another step."""
    shutil.copytree(run.checkpoint(5), run.checkpoint(step))
    manifest = read_json(run.checkpoint(step) / "manifest.json") | {"step": step}
    manifest.pop("sha256")
    write_json(run.checkpoint(step) / "manifest.json", seal(manifest))


def test_what_is_being_scored_stays_and_what_comes_meanwhile_is_scored_too(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training saves step 10 and lets old checkpoints go, between two Units of step 5."""
    work_off, removed = Evaluation._work_off, []

    def work_off_beside_training(self: Evaluation, *words: Any) -> None:
        if not removed:
            add_checkpoint(run, 10)
            removed.append(remove_old(run.checkpoints, 1))
        work_off(self, *words)

    monkeypatch.setattr(Evaluation, "_work_off", work_off_beside_training)
    wanted = config(checkpoints=["last"])
    assert evaluate(run, wanted, ATTEMPT) == 10
    assert removed == [[]]
    for step in (5, 10):
        assert is_scored(run, step, "bits_per_byte")
    assert remove_old(run.checkpoints, 1) == [5]


def test_retention_waits_for_evaluation(run: Run) -> None:
    from pipeline.run.complete import awaits_evaluation

    for step in (6, 7, 8):
        add_checkpoint(run, step)
    wanted = lambda step: awaits_evaluation(run, config(), step)  # noqa: E731
    write_json(run.score(6, "bits_per_byte"), {"score": 1.0})
    assert remove_old(run.checkpoints, 1, wanted=wanted) == [6]
    assert run.checkpoint_steps() == [0, 5, 7, 8]


# Questions


class Favourite(torch.nn.Module):
    """A model that holds one token to be likely, wherever it is."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token = token

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*ids.shape, 310)
        logits[..., self.token] = 5.0
        return logits


def favourite(tokenizer: Tokenizer, text: str) -> Any:
    (token,) = set(tokenizer.encode(text).tolist())
    return Favourite(token)


def test_multiple_choice_takes_the_likeliest_per_byte(made: Run) -> None:
    tokenizer = Tokenizer(made.tokenizer)
    questions = [Question("z", ("q", "jjj"), 0), Question("z", ("jj", "q"), 0)]
    task = QuestionTask(questions, "multiple_choice", tokenizer, size=16, batch_size=4)
    values = task.score(favourite(tokenizer, "q"), HARDWARE, range(task.batches), lambda: None)
    assert values == {"right": [1.0, 0.0], "right_normalised": [1.0, 0.0]}


def test_a_cloze_is_right_where_greedy_decoding_writes_it(made: Run) -> None:
    tokenizer = Tokenizer(made.tokenizer)
    task = QuestionTask(
        [Question("z", ("qq",), 0), Question("z", ("qj",), 0)], "cloze", tokenizer, size=16, batch_size=1
    )
    values = task.score(favourite(tokenizer, "q"), HARDWARE, range(task.batches), lambda: None)
    assert values["right"] == [1.0, 0.0]
    assert values["bytes"] == [2.0, 2.0]
    likely = 5 - math.log(math.exp(5) + 309)
    assert values["nll"][0] == pytest.approx(-len(tokenizer.encode("qq")) * likely, rel=1e-5)


def test_a_question_scores_the_same_beside_longer_ones(made: Run) -> None:
    tokenizer = Tokenizer(made.tokenizer)
    model = Transformer(config().model, 310, 16)
    model.init_weights(3)
    short = Question("a b", (" c", " dd"), 1)
    long = Question("x y z w " * 9, (" c d e", " f"), 0)  # its context is cut from the left
    alone = QuestionTask([short], "cloze", tokenizer, size=16, batch_size=9)._likelihoods(model, HARDWARE, range(1))
    both = QuestionTask([short, long], "cloze", tokenizer, size=16, batch_size=9)._likelihoods(
        model, HARDWARE, range(2)
    )
    assert both[0][:2] == pytest.approx(alone[0], rel=1e-6)


def test_a_score_names_the_questions_that_were_scored(made: Run) -> None:
    short, long = Question("a", (" b",), 0), Question("a", ("x" * 100,), 0)
    tokenizer = Tokenizer(made.tokenizer)
    alone, both, all_fit = (
        QuestionTask(questions, "cloze", tokenizer, size=size, batch_size=9).about
        for questions, size in (([short], 16), ([short, long], 16), ([short, long], 200))
    )
    assert (both["left_out"], all_fit["left_out"]) == (1, 0)
    assert alone["content_sha256"] == both["content_sha256"] != all_fit["content_sha256"]


@pytest.mark.parametrize(
    ("line", "kind", "said"),
    [
        ("{", "cloze", ":2: not JSON"),
        ("[1]", "cloze", ":2: no JSON object"),
        ('{"context": "\\ud800", "target": "x"}', "cloze", ":2: not valid Unicode"),
        ('{"target": "x"}', "cloze", ':2: has no "context" that is a text'),
        ('{"context": "x", "target": ""}', "cloze", ':2: has no "target"'),
        (
            '{"context": "x", "choices": ["a"], "answer": 0}',
            "multiple_choice",
            'needs "choices", a list of two or more',
        ),
        ('{"context": "x", "choices": ["a", "b"], "answer": 2}', "multiple_choice", "0 to 1"),
    ],
)
def test_a_mistake_in_a_file_of_questions_is_named(tmp_path: Path, line: str, kind: str, said: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises(UserError, match=said):
        read_questions(path, kind)


def test_a_missing_harness_is_named_with_the_remedy(made: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(UserError, match=r"arc_easy is of the kind lm_eval, .* pip install 'lm-eval\[hf\]"):
        HarnessTask("arc_easy", None, Tokenizer(made.tokenizer), size=16, batch_size=4)


@pytest.mark.parametrize("changed", ["task.yaml", "utils.py", "data/questions.jsonl"])
def test_all_of_a_folder_of_tasks_is_what_a_score_was_measured_on(tmp_path: Path, changed: str) -> None:
    for name in ("task.yaml", "utils.py", "data/questions.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    before = folder_digest(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "utils.pyc").write_text("made by whoever imports it")
    assert folder_digest(tmp_path) == before
    (tmp_path / changed).write_text("other")
    assert folder_digest(tmp_path) != before
    (tmp_path / changed).rename(tmp_path / "renamed")
    assert folder_digest(tmp_path) not in (before, folder_digest(None))
