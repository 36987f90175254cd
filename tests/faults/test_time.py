"""Where the time of a Run went, over attempts that end in many ways: it adds up to the wall time."""

from __future__ import annotations

from pathlib import Path

import pytest
from by_hand import Attempt, events, losses, make_data, make_run, wait_for, weights

from pipeline.files import read_json, read_lines
from pipeline.run.goodput import read_split

KEYS = ("pretrain.max_steps=400", "pretrain.save_interval=100")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return make_data(tmp_path_factory.mktemp("time"), corpus)


def test_the_time_adds_up_over_attempts_that_trained_and_attempts_that_did_not(data: Path) -> None:
    twin, run = make_run(data, "twin", *KEYS), make_run(data, "run", *KEYS)
    assert Attempt(twin).wait() == 0
    config, module = run.config.read_text(), run.snapshot / "pipeline" / "lm" / "model.py"
    run.config.write_text(config + "colour: blue\n")
    assert Attempt(run).wait() == 2
    run.config.write_text(config)
    source = module.read_text()
    module.write_text(f"{source}\nraise ImportError('broken')\n")
    assert Attempt(run, number=1).wait() == 1
    module.write_text(source)
    killed = "rank=0,step=300,do=slow_save;rank=0,step=360,do=kill"  # the save of 300 never comes to its end
    assert Attempt(run, number=2, inject=killed).wait() == 1
    assert Attempt(run, number=3).wait() == 0
    assert [event["step"] for event in events(run, "resume")] == [200]
    assert (losses(run), weights(run, 400)) == (losses(twin), weights(twin, 400))

    split = read_split(run)
    assert split is not None
    spanned = read_lines(run.events)[-1]["time"] - read_json(run.verdict("1", 0))["began"]
    assert split.wall == pytest.approx(spanned, rel=0.01)
    # Steps 201 to 359 were lost; their time is none of the steps', and steps take about the same time each.
    assert split.repeated > 0.3 * split.step * 159 / 400
    never_trained = [read_json(run.verdict("1", number)) for number in (0, 1)]
    assert split.startup > sum(verdict["time"] - verdict["began"] for verdict in never_trained)


def test_the_time_of_a_rollback_is_repeated(data: Path) -> None:
    run = make_run(data, "rolled", *KEYS, "pretrain.on_divergence=rollback")
    assert Attempt(run, inject="rank=0,step=190,do=nan_loss").wait() == 0
    split = read_split(run)
    assert split is not None
    began = events(run, "start")[0]["began"]
    assert split.wall == pytest.approx(read_lines(run.events)[-1]["time"] - began, rel=0.01)
    assert split.repeated > 0


def test_a_second_script_waits_for_the_first_and_no_moment_counts_twice(data: Path) -> None:
    run = make_run(data, "waits", *KEYS)
    first = Attempt(run, inject="rank=0,step=100,do=slow_save,seconds=6;rank=0,step=110,do=term")
    wait_for(lambda: any(run.checkpoints.glob(".step-00000100.*")), 60, first)
    second = Attempt(run, number=1)
    assert first.wait() == 75
    assert second.wait() == 0
    split = read_split(run)
    assert split is not None
    began = events(run, "start")[0]["began"]
    assert split.wall == pytest.approx(read_lines(run.events)[-1]["time"] - began, rel=0.01)
    assert "SIGTERM" in first.verdict["reason"]
