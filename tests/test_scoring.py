"""Units: the same Score however it is cut and whoever comes first; claims; one table; gates; releases."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from example_run import make_run

from pipeline.config.load import load_run_config
from pipeline.config.schema import Config
from pipeline.evaluation.claims import Claimant, holders, release
from pipeline.evaluation.gate import apply_gate
from pipeline.evaluation.score_kinds import lm_eval
from pipeline.evaluation.score_table import make_table, write_table
from pipeline.evaluation.scoring import Cut, batches_per_unit, is_scored, merge, settle_cut, units_of, what_is_left
from pipeline.files import read_json, read_lines, write_json
from pipeline.run.complete import is_complete
from pipeline.run.folder import Run
from pipeline.run.owner import this_process
from pipeline.run.records import read_scores

BATCHES = 37
ABOUT = {"bytes": 4000, "checkpoint": "step-00000100", "checkpoint_sha256": "", "tokenizer": "c0ffee"}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def losses(batches: range) -> dict[str, list[float]]:
    """Return what a model would say of these batches: numbers that no two orders of adding give the same sum of."""
    return {
        "nll": [random.Random(at).uniform(1, 1e6) ** 0.5 for at in batches],
        "tokens": [64.0 - at % 2 for at in batches],
    }


def score_all(run: Run, step: int, per_unit: int, order: int = 0) -> dict[str, Any]:
    cut = settle_cut(run, step, "bits_per_byte", Cut("key", BATCHES, per_unit, ABOUT))
    units = units_of(run, step, "bits_per_byte", cut)
    random.Random(order).shuffle(units)
    for unit in units:
        assert merge(run, step, "bits_per_byte", "bits_per_byte", cut) is None
        unit.write(losses(unit.batches), 0.5, job_id="7", attempt=0)
    record = merge(run, step, "bits_per_byte", "bits_per_byte", cut)
    assert record is not None
    return record


def test_a_score_is_the_same_however_it_is_cut_and_in_any_order(run: Run) -> None:
    records = [score_all(run, step, per_unit, step) for step, per_unit in enumerate((1, 2, 5, 36, 37))]
    assert [record["units"] for record in records] == [37, 19, 8, 2, 1]
    assert len({(r["score"], r["error"], r["nll"], r["tokens"]) for r in records}) == 1


def test_the_first_cut_holds_until_the_weights_change(run: Run) -> None:
    assert settle_cut(run, 1, "b", Cut("key", 10, 3, ABOUT)).per_unit == 3
    assert settle_cut(run, 1, "b", Cut("key", 10, 5, ABOUT)).per_unit == 3
    again = settle_cut(run, 1, "b", Cut("other weights", 10, 5, ABOUT))
    assert again.per_unit == 5
    assert not list(run.slices(1, "b").glob(".cut*"))


def test_a_torn_or_foreign_result_is_made_again(run: Run) -> None:
    score_all(run, 0, 5)
    cut = settle_cut(run, 0, "bits_per_byte", Cut("key", BATCHES, 5, ABOUT))
    first, second, *_ = units_of(run, 0, "bits_per_byte", cut)
    first.path.write_bytes(first.path.read_bytes()[:40])
    write_json(second.path, read_json(second.path) | {"key": "of other weights"})
    assert merge(run, 0, "bits_per_byte", "bits_per_byte", cut) is None
    assert (first.result(), second.result()) == (None, None)


def test_units_are_about_as_long_as_asked_for(run: Run, tmp_path: Path) -> None:
    config = load_run_config(make_run(tmp_path / "made").config)
    assert batches_per_unit(config, 1000, 0.5) == 120  # 60 s
    assert batches_per_unit(config, 50, 0.5) == 50
    assert batches_per_unit(config, 1000, 90.0) == 1
    assert batches_per_unit(config, 1000, None) == 16


# Claims


def take_all(folder: Path, job: int, start: Any, log: Path) -> None:
    start.wait()
    claimant, mine = Claimant(str(job), 0), []
    for number in range(30):
        result = folder / f"{number}.json"
        if not result.exists() and claimant.claim(folder / f"{number}.claim") and not result.exists():
            mine.append(number)
            write_json(result, {"job": job})
            release(folder / f"{number}.claim")
    write_json(log / f"{job}.json", mine)


def test_sixteen_jobs_at_once_do_each_unit_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, log = context.Event(), tmp_path / "log"
    jobs = [context.Process(target=take_all, args=(tmp_path / "units", job, start, log)) for job in range(16)]
    (tmp_path / "units").mkdir()
    for process in jobs:
        process.start()
    start.set()
    for process in jobs:
        process.join(60)
    done = [number for path in log.glob("*.json") for number in read_json(path)]
    assert sorted(done) == list(range(30))


ROWS = range(1, 7)


def work_off_all(run: Run, job: int, start: Any, dead: frozenset[str] = frozenset()) -> None:
    """Score all steps as a Job does; Job 3 is killed in the middle of its second Unit."""
    start.wait()
    claimant, done = Claimant(str(job), 0, dead), 0
    for step in ROWS:
        cut = settle_cut(run, step, "bits_per_byte", Cut("key", BATCHES, 10 + job, ABOUT))
        for unit in units_of(run, step, "bits_per_byte", cut):
            if unit.result() is None and claimant.claim(unit.claim):
                done += 1
                if job == 3 and done == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                unit.write(losses(unit.batches), 0.5, job_id=str(job), attempt=0)
                release(unit.claim)
        if record := merge(run, step, "bits_per_byte", "bits_per_byte", cut):
            write_json(run.score(step, "bits_per_byte"), record)
            write_table(run)


def test_many_jobs_at_once_one_of_them_killed_make_one_right_table(run: Run, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start = context.Event()
    jobs = [context.Process(target=work_off_all, args=(run, job, start)) for job in range(8)]
    for process in jobs:
        process.start()
    start.set()
    for process in jobs:
        process.join(60)
    assert [process.exitcode for process in jobs].count(0) >= 7
    work_off_all(run, 8, start, frozenset({"3.0"}))  # takes over what the dead one held
    before = run.score_table.read_text()
    work_off_all(run, 9, start)  # and once more, for nothing
    assert run.score_table.read_text() == before
    alone = score_all(Run(tmp_path / "alone"), 1, 5)
    rows = list(csv.DictReader(before.splitlines()))
    assert [(int(row["step"]), float(row["bits_per_byte"])) for row in rows] == [
        (step, alone["score"]) for step in ROWS
    ]


def die_with_a_claim(path: Path) -> None:
    Claimant("8", 0).claim(path)
    time.sleep(60)


def test_a_dead_owners_claim_is_taken_over_a_living_ones_is_not(tmp_path: Path) -> None:
    path = tmp_path / "0000.claim"
    process = multiprocessing.get_context("fork").Process(target=die_with_a_claim, args=(path,))
    process.start()
    deadline = time.monotonic() + 30
    while not holders([path]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Claimant("9", 0).claim(path)
    assert process.pid
    process.kill()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert not Claimant("9", 0, frozenset()).claim(path)  # under Slurm only the host may say so
    assert Claimant("9", 0, frozenset({"8.0"})).claim(path)
    assert [holder["job_id"] for holder in holders([path])] == ["9"]


def test_a_requeued_job_follows_its_own_earlier_attempt(tmp_path: Path) -> None:
    path = tmp_path / "0000.claim"
    write_json(tmp_path / ".0000.claim.000001", this_process() | {"job_id": "8", "attempt": 0, "pid": 1})
    assert not Claimant("9", 1, frozenset()).claim(path)
    assert Claimant("8", 1, frozenset()).claim(path)


# What is left


@pytest.fixture
def made(tmp_path: Path) -> tuple[Run, Config]:
    """A finished Run with checkpoints 0 and 900, both scored."""
    run = make_run(tmp_path / "made")
    return run, load_run_config(run.config)


def test_a_score_of_other_weights_under_the_same_step_does_not_count(made: tuple[Run, Config]) -> None:
    run, config = made
    assert is_complete(run, config, "evaluate")
    path = run.score(900, "bits_per_byte")
    write_json(path, read_json(path) | {"checkpoint_sha256": "before the rollback"})
    assert is_scored(run, 900, "bits_per_byte")  # nothing says what the checkpoint holds
    write_json(run.checkpoint(900) / "manifest.json", {"step": 900, "sha256": "after it"})
    assert not is_scored(run, 900, "bits_per_byte")
    assert not is_complete(run, config, "evaluate")
    left = what_is_left(run, config, [0, 900])
    assert (left.units, left.uncut) == ([], [(900, "bits_per_byte")])
    assert left.seconds == pytest.approx(60, abs=60)


def test_open_units_are_what_is_left_and_tell_how_long_they_take(made: tuple[Run, Config]) -> None:
    run, config = made
    run.score(0, "bits_per_byte").unlink()
    run.score(900, "bits_per_byte").unlink()
    cut = settle_cut(run, 900, "bits_per_byte", Cut("key", BATCHES, 10, ABOUT))
    first = units_of(run, 900, "bits_per_byte", cut)[0]
    first.write(losses(first.batches), 5.0)
    left = what_is_left(run, config, [900])
    assert [unit.number for unit in left.units] == [1, 2, 3]
    assert left.seconds == pytest.approx(27 * 0.5)
    assert bool(left)
    assert not what_is_left(run, config, [])


# The table


def add(run: Run, step: int, benchmark: str, score: float, unit: str, error: float | None = None) -> None:
    record = {"benchmark": benchmark, "score": score, "unit": unit, "step": step, "error": error}
    write_json(run.score(step, benchmark), record)


def test_one_table_with_the_best_and_the_newest(run: Run) -> None:
    for step, score in ((0, 4.0), (100, 1.5), (200, 1.6)):
        add(run, step, "bits_per_byte", score, "bits/byte", 0.01)
    add(run, 100, "arc", 0.5, "share")
    add(run, 0, "arc", 0.25, "share")
    table = make_table(read_scores(run))
    assert table.benchmarks == ["bits_per_byte", "arc"]
    assert [[str(cell) if cell else "" for cell in cells] for _, cells in table.rows] == [
        ["4.0000 ± 0.0100", "0.2500"], ["1.5000 ± 0.0100 *", "0.5000 *"], ["1.6000 ± 0.0100", ""],
    ]  # fmt: skip
    write_table(run)
    before = run.score_table.read_text()
    write_table(run)
    assert run.score_table.read_text() == before
    rows = list(csv.DictReader(before.splitlines()))
    assert [row["bits_per_byte"] for row in rows] == ["4.0", "1.5", "1.6"]
    assert [row["marks"] for row in rows] == ["", "best bits_per_byte; best arc", "newest"]


def test_a_torn_score_is_no_row(run: Run) -> None:
    add(run, 0, "bits_per_byte", 4.0, "bits/byte")
    add(run, 100, "bits_per_byte", 2.0, "bits/byte")
    run.score(100, "bits_per_byte").write_text(run.score(100, "bits_per_byte").read_text()[:30])
    assert [step for step, _ in make_table(read_scores(run)).rows] == [0]
    assert not is_scored(run, 100, "bits_per_byte")


# Gates


def gates(run: Run, *rules: dict[str, Any]) -> Config:
    text = json.dumps({"name": "x", "evaluate": {"gate": list(rules)}})
    return Config.model_validate(json.loads(text))


def test_a_gate_writes_an_event_once(run: Run) -> None:
    config = gates(run, {"worse_than_best_by": 0.05})
    for step, score in ((0, 4.0), (100, 1.5), (200, 1.54), (300, 1.56)):
        add(run, step, "bits_per_byte", score, "bits/byte")
        apply_gate(run, config, step, "bits_per_byte")
        apply_gate(run, config, step, "bits_per_byte")
    (event,) = read_lines(run.events)
    assert (event["event"], event["step"], event["action"]) == ("gate", 300, "event")
    assert event["reason"] == "step 300: bits_per_byte is 1.5600, 0.0600 worse than at step 100"
    assert not run.stop.exists()


@pytest.mark.parametrize(("rule", "stops"), [({"above": 1.4}, True), ({"above": 1.6}, False), ({"below": 2}, True)])
def test_a_gate_may_stop_the_chain(run: Run, rule: dict[str, Any], stops: bool) -> None:
    add(run, 100, "bits_per_byte", 1.5, "bits/byte")
    apply_gate(run, gates(run, rule | {"action": "stop"}), 100, "bits_per_byte")
    assert run.stop.exists() == stops


@pytest.mark.parametrize(("metric", "unit"), [("acc_norm", "share"), ("bits_per_byte", "bits/byte")])
def test_a_harness_score_has_the_unit_of_its_metric(metric: str, unit: str) -> None:
    record = lm_eval({metric: [0.4], "error": [-1.0]}, {})
    assert record == {"score": 0.4, "unit": unit, "metric": metric, "error": None}
