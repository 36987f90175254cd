"""Where a Run is: the folder that a person names. Moved, renamed, copied and linked Runs, and other checkouts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from example_run import make_run
from micro import PROJECT, environment
from slurm_site import Site

from pipeline.config.load import dump_config, load_config
from pipeline.files import read_json, write_json
from pipeline.run.folder import Run
from pipeline.run.place import place_of, settle_place

Pipeline = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a Run that has recorded where it is."""
    run = make_run(tmp_path / "runs" / "example")
    write_json(run.record, {"id": "0123456789ab"})
    settle_place(run)
    return run


def moved(run: Run, to: str) -> Run:
    return Run(run.root.rename(run.root.parent / to))


def copied(run: Run, to: str) -> Run:
    return Run(Path(shutil.copytree(run.root, run.root.parent / to)))


def test_a_run_at_home_is_neither_moved_nor_copied(run: Run) -> None:
    place = place_of(run)
    assert (place.id, place.moved, place.copied) == ("0123456789ab", False, False)


def test_a_renamed_run_is_moved_and_keeps_its_id(run: Run) -> None:
    there = moved(run, "other")
    place = place_of(there)
    assert (place.id, place.moved, place.copied, place.former) == ("0123456789ab", True, False, run.root)
    settle_place(there)
    assert place_of(there) == place_of(there)._replace(id="0123456789ab", moved=False, copied=False)
    assert read_json(there.record)["folder"] == str(there.root)


def test_where_another_run_has_taken_its_folder_it_is_moved(run: Run) -> None:
    there = moved(run, "other")
    newer = make_run(run.root)
    write_json(newer.record, {"id": "ffffffffffff"})
    settle_place(newer)
    assert place_of(there).moved
    assert not place_of(newer).moved


def test_a_copy_gets_an_id_of_its_own_and_leaves_word_of_what_it_came_from(run: Run) -> None:
    copy = copied(run, "copy")
    place = place_of(copy)
    assert (place.id, place.copied, place.moved) == (None, True, False)
    settle_place(copy)
    record = read_json(copy.record)
    assert record["id"] != "0123456789ab"
    assert (record["copied_from"], record["copied_from_id"]) == (str(run.root), "0123456789ab")
    assert record["copied_at_step"] == 900
    assert place_of(copy).id == record["id"]
    assert not copy.jobs.exists()
    assert not copy.attempts.exists()
    assert (copy.inherited("0123456789ab") / "jobs.json").is_file()
    assert place_of(run).id == "0123456789ab"
    assert run.jobs.is_file()


def test_a_copy_of_a_copy_goes_on_from_there(run: Run) -> None:
    copy = copied(run, "copy")
    settle_place(copy)
    second = copied(copy, "second")
    settle_place(second)
    record = read_json(second.record)
    assert record["copied_from_id"] == read_json(copy.record)["id"]
    assert len({read_json(each.record)["id"] for each in (run, copy, second)}) == 3


def test_a_copy_whose_original_was_moved_away_is_no_second_original(run: Run) -> None:
    copy = copied(run, "copy")
    original = moved(run, "original")
    assert place_of(copy).copied
    assert place_of(original).moved


def test_a_copy_put_where_the_original_was_leaves_one_with_its_id(run: Run) -> None:
    original = moved(run, "original")
    again = Run(Path(shutil.copytree(original.root, run.root)))
    assert [place_of(each).id for each in (original, again)].count("0123456789ab") == 1


def test_a_link_is_the_run_itself(run: Run) -> None:
    link = run.root.parent / "newest"
    link.symlink_to(run.root)
    place = place_of(Run(link))
    assert (place.moved, place.copied) == (False, False)
    assert place.root == run.root


def test_a_run_of_before_is_told_by_its_plan(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "example")
    write_json(run.record, {"id": "0123456789ab"})
    write_json(run.plan, {"run": str(run.root), "jobs": []})
    assert place_of(copied(run, "copy")).copied
    assert place_of(moved(run, "other")).moved


def test_a_copy_that_was_killed_half_way_into_its_own_id_goes_on(run: Run) -> None:
    copy = copied(run, "copy")
    copy.inherited("0123456789ab").mkdir(parents=True)
    copy.jobs.rename(copy.inherited("0123456789ab") / "jobs.json")  # and then the power went
    settle_place(copy)
    assert place_of(copy).id not in (None, "0123456789ab")
    assert not copy.attempts.exists()


def test_a_wish_about_the_tokens_stays_with_a_copy_and_a_stop_does_not(run: Run) -> None:
    run.control.mkdir(exist_ok=True)
    run.keep_tokens.touch()
    run.stop.touch()
    copy = copied(run, "copy")
    settle_place(copy)
    assert copy.keep_tokens.is_file()
    assert not copy.stop.exists()


def test_leases_of_the_original_do_not_hold_its_copy(run: Run) -> None:
    run.control.mkdir(exist_ok=True)
    write_json(run.control / "scheduler.json", {"host": "elsewhere", "pid": 1, "started": "1"})
    copy = copied(run, "copy")
    settle_place(copy)
    assert not (copy.control / "scheduler.json").exists()


# The verbs


@pytest.fixture
def trained(micro: Path, tmp_path: Path) -> Run:
    """Return a Run of the config `micro` that looks trained, without a minute of training."""
    run = make_run(tmp_path / "runs" / "micro")
    run.config.write_text(dump_config(load_config(micro)))
    write_json(run.record, {"id": "0123456789ab"})
    settle_place(run)
    return run


@pytest.mark.parametrize("how", [moved, copied])
@pytest.mark.parametrize("words", [["plan"], ["submit", "--dry-run"]], ids=["plan", "submit"])
def test_a_verb_means_the_folder_that_is_named(
    trained: Run, pipeline: Pipeline, how: Callable[[Run, str], Run], words: list[str]
) -> None:
    there = how(trained, "else")
    result = pipeline(*words, there.root, "--cluster", "local")
    assert f"Run else in {os.path.relpath(there.root, there.root.parent.parent)}" in result.stdout, result.stderr
    before = {"micro"} if how is copied else set()
    assert {path.name for path in there.root.parent.iterdir()} == {"else"} | before


def test_another_checkout_acts_on_the_folder_and_makes_none_of_its_own(trained: Run, tmp_path: Path) -> None:
    trained.config.write_text(
        trained.config.read_text().replace(str(trained.root.parent), "runs")
    )  # a default runs_dir
    other = tmp_path / "checkout"
    for folder in ("pipeline", "sbatch", "configs"):
        shutil.copytree(PROJECT / folder, other / folder)
    result = subprocess.run(
        [sys.executable, "-m", "pipeline", "plan", str(trained.root), "--cluster", "local", "--json"],
        capture_output=True, text=True, cwd=tmp_path, env=environment(PYTHONPATH=str(other)), check=True, timeout=60,
    )  # fmt: skip
    assert json.loads(result.stdout)["run"] == str(trained.root)


def test_the_config_inside_a_run_is_the_run(trained: Run, pipeline: Pipeline) -> None:
    there = moved(trained, "else")
    assert json.loads(pipeline("plan", there.config, "--json").stdout)["run"] == str(there.root)
    beside = json.loads(pipeline("plan", there.config, "name=third", "--json").stdout)
    assert beside["run"] == str(there.root.parent / "third")


def test_resume_makes_no_run_of_another_name(trained: Run, pipeline: Pipeline) -> None:
    refused = pipeline("resume", trained.root, "name=third")
    assert refused.returncode == 2
    assert "submit" in refused.stderr
    assert not (trained.root.parent / "third").exists()


def test_a_folder_that_cannot_be_a_name_is_refused_with_what_to_do(trained: Run, pipeline: Pipeline) -> None:
    there = moved(trained, "my run (copy)")
    refused = pipeline("resume", there.root)
    assert refused.returncode == 2
    assert "mv" in refused.stderr
    assert pipeline("status", there.root).returncode in (0, 1)


def test_a_run_named_from_inside_of_it(trained: Run, pipeline: Pipeline) -> None:
    logs = trained.root / "logs"
    result = subprocess.run(
        [sys.executable, "-m", "pipeline", "plan", "..", "--cluster", "local", "--json"],
        capture_output=True, text=True, cwd=logs, env=environment(), check=True, timeout=60,
    )  # fmt: skip
    assert json.loads(result.stdout)["run"] == str(trained.root)


# Their Jobs


@pytest.fixture
def site(tmp_path: Path, micro: Path, pipeline: Pipeline) -> Site:
    return Site(tmp_path, micro, pipeline)


def test_no_verb_on_a_copy_reaches_the_originals_jobs(site: Site) -> None:
    site.submit()
    site.set("tokenize", "RUNNING", nodes="n1")
    copy = copied(site.run, "copy")
    before = site.queue
    assert json.loads(site.verb("status", copy.root, "--json").stdout)["jobs"] == []
    assert site.verb("cancel", copy.root).returncode == 3
    assert (
        f"copy of {os.path.relpath(site.run.root, site.run.root.parent.parent)}"
        in site.verb("cancel", copy.root).stderr
    )
    assert site.verb("stop", copy.root).returncode == 3
    assert site.verb("save", copy.root).returncode == 3
    assert site.queue == before
    resumed = site.verb("resume", copy.root)
    assert resumed.returncode == 0, resumed.stderr
    ours = [job for job_id, job in site.queue.items() if job_id not in before]
    assert {job["words"][-1] for job in ours} == {str(copy.root)}
    assert len(ours) >= 4
    site.verb("cancel", copy.root)
    assert {job_id: site.queue[job_id]["state"] for job_id in before} == {
        job_id: job["state"] for job_id, job in before.items()
    }


def test_a_moved_run_refuses_while_jobs_wait_with_its_old_folder(site: Site) -> None:
    site.submit()
    there = moved(site.run, "else")
    refused = site.verb("resume", there.root)
    assert refused.returncode == 3, refused.stderr
    assert "cancel" in refused.stderr
    assert site.verb("cancel", there.root).returncode == 0
    resumed = site.verb("resume", there.root)
    assert resumed.returncode == 0, resumed.stderr
    live = [job for job in site.queue.values() if job["state"] == "PENDING"]
    assert {job["words"][-1] for job in live} == {str(there.root)}
    assert str(site.run.root) + "/" not in there.launch("pretrain").read_text()
    assert read_json(there.record)["folder"] == str(there.root)
