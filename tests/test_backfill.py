"""Evaluate Jobs beside the chain: each once, no more than there is work for, and what is left is handed on."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

import fake_slurm
import pytest
from conftest import PROJECT, environment
from example_run import make_run

from pipeline.cluster.schema import Cluster
from pipeline.config.load import load_run_config
from pipeline.config.yaml12_dump import dump
from pipeline.evaluation.backfill import Backfill, main
from pipeline.evaluation.scoring import Cut, settle_cut, units_of
from pipeline.files import read_json, read_lines, write_json, write_text
from pipeline.host.evaluate import EvaluateBegin, EvaluateEnd
from pipeline.plan.launch import launch_file
from pipeline.run import job_ledger
from pipeline.run.attempts import read_attempt
from pipeline.run.complete import steps_to_evaluate
from pipeline.run.folder import Run
from pipeline.run.records import JobRecord
from pipeline.run.verdict import write_said
from pipeline.slurm.commands import Slurm
from pipeline.submit.to_slurm import queue_evaluations

CUT = Cut("key", 30, 10, {"bytes": 4000, "checkpoint_sha256": ""})
NOTHING_TO_DO = 100


class Place:
    """A Run on the fake Slurm whose last checkpoint is not scored yet; all is asked in this process."""

    def __init__(self, folder: Path, **cluster: object) -> None:
        self.slurm = folder / "slurm"
        self.run = make_run(folder / "example")
        text = self.run.config.read_text().replace("checkpoints: [first, last]", "checkpoints: all")
        write_text(self.run.config, text)
        self.cluster = Cluster.model_validate({"scheduler": "slurm", "sbatch": {"qos": "low"}, **cluster})
        write_text(self.run.cluster, dump(self.cluster.model_dump()))
        self.run.score(900, "bits_per_byte").unlink()
        settle_cut(self.run, 900, "bits_per_byte", CUT)

    @property
    def backfill(self) -> Backfill:
        return Backfill(self.run, load_run_config(self.run.config), self.cluster, Slurm(pauses=()))

    def another(self) -> JobRecord:
        """Submit one more, whatever there is work for."""
        return self.backfill.queue.submit("evaluate", role="beside", minutes=10)

    @property
    def queue(self) -> dict[str, dict]:
        return fake_slurm.read(self.slurm)

    def asked(self) -> int:
        return main([str(self.run.root)])

    def claim(self, unit: int, job_id: str, attempt: int = 0) -> None:
        path = self.run.slices(900, "bits_per_byte") / f".{unit:04d}.claim.000001"
        write_json(path, {"host": "n1", "pid": 1, "job_id": job_id, "attempt": attempt})

    def finish(self, *units: int, job_id: str = "101") -> None:
        for unit in units_of(self.run, 900, "bits_per_byte", CUT):
            if unit.number in units:
                values = {"nll": [1.0] * len(unit.batches), "tokens": [1.0] * len(unit.batches)}
                unit.write(values, 9.0, job_id=job_id, attempt=0)

    def begin(self, job_id: str = "101", attempt: int = 0, **changes: object) -> int:
        fake_slurm.set_state(self.slurm, job_id, "RUNNING", nodes="n1", restarts=attempt, **changes)
        return EvaluateBegin(self.run, "evaluate", job_id, attempt).begin()

    def end(self, verdict: str = "complete", job_id: str = "101") -> int:
        write_said(self.run, job_id, 0, "evaluate", verdict, "", None)
        return EvaluateEnd(self.run, "evaluate", job_id, 0).end(0)


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in fake_slurm.install(tmp_path / "slurm").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    (tmp_path / "slurm" / "sinfo.answer").write_text("")


@pytest.fixture
def place(tmp_path: Path, on_path: None) -> Place:
    return Place(tmp_path)


def test_a_new_checkpoint_has_one_job_submitted_however_often_it_is_told(place: Place) -> None:
    assert [place.asked() for _ in range(3)] == [0, 0, 0]
    (words,) = (job["words"] for job in place.queue.values())
    assert {"--qos=low", "--nice=10000", "--nodes=1"} <= set(words)
    limits = [word for word in words if word.startswith("--time")]
    assert [limit.split("=")[0] for limit in limits] == ["--time", "--time-min"]
    assert words[-2:] == [str(place.run.snapshot / "sbatch" / "evaluate.sbatch"), str(place.run.root)]
    (record,) = job_ledger.read_ledger(place.run)
    assert (record.number, record.job_id, record.role, record.stage) == (1, "101", "beside", "evaluate")
    assert record.token == place.queue["101"]["comment"] == "pipeline:example:evaluate.000001"


def test_no_more_jobs_than_the_key_says(place: Place) -> None:
    for _ in range(9):
        place.backfill.submit(1e6, "a test")
    assert len(place.queue) == 4


def test_a_submit_that_was_killed_is_found_again(place: Place) -> None:
    place.asked()
    (record,) = job_ledger.read_ledger(place.run)
    job_ledger.keep(place.run, record.but(job_id=None))
    assert place.asked() == 0
    assert len(place.queue) == 1
    assert [record.job_id for record in job_ledger.read_ledger(place.run)] == ["101"]


def test_preempted_jobs_do_not_count_as_living(place: Place) -> None:
    for _ in range(9):
        place.backfill.submit(1e6, "a test")
    for job_id in list(place.queue):
        fake_slurm.set_state(place.slurm, job_id, "PREEMPTED")
    place.asked()
    assert [job["state"] for job in place.queue.values()][4:] == ["PENDING"]


def test_a_job_of_the_chain_is_none_beside_training(place: Place) -> None:
    """It waits for training to end, and cannot do what the schedule has room for now."""
    place.backfill.queue.submit("evaluate", "afterany:7")
    place.asked()
    assert [record.role for record in job_ledger.read_ledger(place.run)] == ["chain", "beside"]
    assert len(place.backfill.live()) == 1


def test_nothing_is_submitted_where_nothing_is_left_or_a_person_said_stop(place: Place) -> None:
    place.run.stop.parent.mkdir(exist_ok=True)
    place.run.stop.touch()
    place.asked()
    place.run.stop.unlink()
    write_json(place.run.score(900, "bits_per_byte"), {"score": 1.0})
    place.asked()
    assert place.queue == {}


def test_the_key_and_the_first_and_last_checkpoint_alone_mean_no_jobs_beside_training(place: Place) -> None:
    text = place.run.config.read_text()
    for changed in (text.replace("evaluate:", "evaluate:\n  backfill: false"), text.replace("all", "[first, last]")):
        write_text(place.run.config, changed)
        place.asked()
        assert "EVALUATE_BESIDE" not in launch_file(
            "pretrain", load_run_config(place.run.config), place.cluster, place.run
        )
    assert place.queue == {}
    write_text(place.run.config, text)
    assert "EVALUATE_BESIDE=1\n" in launch_file("pretrain", load_run_config(place.run.config), place.cluster, place.run)


def test_an_attempt_learns_its_deadline_and_who_is_dead(place: Place) -> None:
    place.asked()
    jobs = place.queue
    jobs |= {
        id_: jobs["101"] | {"state": state, "comment": ""} for id_, state in (("102", "RUNNING"), ("103", "CANCELLED"))
    }
    fake_slurm.write(place.slurm, jobs)
    for unit, owner in enumerate(("102", "103", "104")):  # the last is one that Slurm has forgotten
        place.claim(unit, owner)
    assert place.begin() == 0
    record = read_json(place.run.beginning("101", 0))
    assert record["dead"] == ["103.0", "104.0"]
    assert record["deadline"] == pytest.approx(time.time() + 600, abs=60)
    beginning = read_attempt(place.run, "101", 0).begin
    assert beginning is not None
    assert beginning.deadline == record["deadline"]


def test_a_job_with_nothing_to_do_ends_at_once(place: Place) -> None:
    place.asked()
    write_json(place.run.score(900, "bits_per_byte"), {"score": 1.0})
    assert place.begin() == NOTHING_TO_DO
    assert not place.run.beginning("101", 0).exists()


def test_a_job_that_finds_no_checkpoint_at_all_does_not_say_that_all_is_scored(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.asked()
    shutil.rmtree(place.run.checkpoints)
    assert place.begin() == 3
    assert "no checkpoint to score" in capsys.readouterr().err


def test_several_attempts_may_run_at_once(place: Place) -> None:
    place.asked()
    place.another()
    assert [place.begin("101"), place.begin("102")] == [0, 0]


def test_a_job_that_leaves_units_behind_submits_its_successor(place: Place) -> None:
    place.asked()
    place.begin()
    place.finish(0)
    assert place.end() == 0  # Slurm still calls it running
    assert list(place.queue) == ["101", "102"]
    assert read_json(place.run.verdict("101", 0))["units"] == 1
    assert "101 left 2 open" in read_lines(place.run.events)[-1]["reason"]


def test_units_that_others_work_on_need_no_successor(place: Place) -> None:
    place.asked()
    place.another()
    fake_slurm.set_state(place.slurm, "102", "RUNNING")
    place.begin()
    place.finish(0, 1)
    place.claim(2, "102")
    fake_slurm.set_state(place.slurm, "101", "COMPLETED")
    assert place.end() == 0
    assert list(place.queue) == ["101", "102"]


def test_jobs_that_finish_nothing_have_an_end(place: Place) -> None:
    codes = []
    for job_id in ("101", "102"):
        place.asked()
        place.begin(job_id)
        fake_slurm.set_state(place.slurm, job_id, "COMPLETED")
        codes.append(place.end(job_id=job_id))
    assert codes == [0, 6]
    assert list(place.queue) == ["101", "102"]


def test_what_another_attempt_cannot_change_ends_it(place: Place) -> None:
    place.asked()
    place.begin()
    fake_slurm.set_state(place.slurm, "101", "COMPLETED")
    assert place.end("config") == 2
    assert list(place.queue) == ["101"]


def test_the_last_one_cancels_those_that_wait(place: Place) -> None:
    place.asked()
    place.backfill.submit(1e6, "another")
    place.begin()
    write_json(place.run.score(900, "bits_per_byte"), {"score": 1.0, "benchmark": "bits_per_byte"})
    assert place.end() == 0
    assert [job["state"] for job in place.queue.values()][1:] == ["CANCELLED"] * (len(place.queue) - 1)
    assert place.run.report.is_file()


def test_where_nodes_may_not_submit_jobs_are_queued_beforehand(tmp_path: Path, on_path: None) -> None:
    place = Place(tmp_path, nodes_may_submit=False)

    class Submitted:
        run, config, cluster = place.run, load_run_config(place.run.config), place.cluster
        slurm, ids = Slurm(pauses=()), {"tokenize": "1", "pretrain-1": "7", "pretrain-2": "8"}

    for _ in range(2):
        queue_evaluations(Submitted)  # type: ignore[arg-type]
    assert [job["dependency"] for job in place.queue.values()] == [
        "after:7+20",
        "after:7+40",
        "after:8+20",
        "after:8+40",
    ]
    place.begin()
    place.finish(0)
    fake_slurm.set_state(place.slurm, "101", "COMPLETED")
    assert place.end() == 75  # nothing can be queued from there


def test_window_shows_holes_and_sizes(place: Place) -> None:
    from pipeline.evaluation.window_view import look

    (place.slurm / "sinfo.answer").write_text("n3|mixed|2/6/0/8|gpu:h100:4|gpu:h100:1(IDX:0)|main*|\n")
    found = look(place.run)
    assert [hole["node"] for hole in found["holes"]] == ["n3"]
    assert found["sizes"][0]["why"] == "n3 is idle until nothing that can be seen"
    json.dumps(found, allow_nan=False)
    assert steps_to_evaluate(place.run, load_run_config(place.run.config)) == [0, 900]


def test_the_batch_shell_of_pretrain_asks_once_for_each_new_checkpoint(tmp_path: Path) -> None:
    run, calls, python = Run(tmp_path / "run"), tmp_path / "calls", tmp_path / "python"
    run.checkpoints.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    python.chmod(0o755)
    script = subprocess.Popen(["sleep", "60"])
    words = ["bash", str(PROJECT / "sbatch" / "watch.sh"), str(run.root), str(python), str(script.pid), "1"]
    watch = subprocess.Popen(words, env=environment(PIPELINE_WATCH_SECONDS="0.05"))

    def asked(times: int) -> bool:
        deadline = time.monotonic() + 30
        while (not calls.is_file() or len(calls.read_text().splitlines()) < times) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)  # and not once more
        return calls.read_text().splitlines() == [f"-m pipeline.evaluation.backfill {run.root}"] * times

    try:
        for times, step in enumerate((0, 250), 1):
            write_json(run.checkpoint(step) / "manifest.json", {})
            assert asked(times)
    finally:
        script.kill()
        script.wait()
    assert watch.wait(30) == 0
