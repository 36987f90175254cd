"""The whole chain, as a person runs it: on real processes, with real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import environment

from pipeline.files import read_json, read_lines
from pipeline.run.folder import Run

Pipeline = Callable[..., "subprocess.CompletedProcess[str]"]


def start(config: Path, *words: str, verb: str = "submit") -> subprocess.Popen[str]:
    """Start a chain in the background, in a session of its own."""
    cluster = ["--cluster", "local"] if verb == "submit" else []
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline", verb, str(config), *cluster, *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=config.parent,
        env=environment(), start_new_session=True,
    )  # fmt: skip


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def processes_of(run: Run) -> list[str]:
    """List the command lines of this machine's processes that name the Run's folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(run.root) in line and path.parent.name != str(os.getpid()):
            found.append(line)
    return found


def steps_logged(run: Run) -> list[int]:
    return [record["step"] for record in read_lines(run.metrics)]


def final_scores(run: Run) -> dict[str, float]:
    return {path.parent.name: read_json(path)["nll"] for path in sorted(run.root.glob("scores/*/bits_per_byte.json"))}


def losses(run: Run) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in read_lines(run.metrics)]


def weights(run: Run, step: int) -> dict[str, str]:
    """Return the hashes of a checkpoint's data files, by name."""
    files = read_json(run.checkpoint(step) / "manifest.json")["files"]
    return {name: file["sha256"] for name, file in files.items() if name.endswith(".bin")}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "runs" / "micro")


def test_one_command_from_text_to_report_and_again_is_free(pipeline: Pipeline, micro: Path, run: Run) -> None:
    first = pipeline("submit", micro, "--cluster", "local")
    assert first.returncode == 0, first.stderr
    assert run.checkpoint_steps() == [0, 10, 15, 20]
    assert set(final_scores(run)) == {"step-00000000", "step-00000020"}
    assert {"gzip -9", "bzip2 -9", "xz -9"} == set(read_json(run.compressors)["bits_per_byte"])
    samples = read_lines(run.samples(20))
    assert [sample["prompt"] for sample in samples] == ["def ", "return "]
    assert "<html" in run.report.read_text(encoding="utf-8")
    assert steps_logged(run) == list(range(2, 21, 2))
    assert not list(run.root.rglob("*.tmp"))

    again = pipeline("submit", micro, "--cluster", "local")
    assert again.returncode == 0
    assert "complete already" in again.stderr
    assert len(list(run.logs.iterdir())) == 4

    status = json.loads(pipeline("status", run.root, "--json").stdout)
    assert (status["state"], status["step"], status["max_steps"]) == ("completed", 20, 20)

    shown = pipeline("generate", run.root, "temperature=0", "--prompt", "def ")
    assert (shown.returncode, shown.stdout[:4]) == (0, "def "), shown.stderr
    assert pipeline("generate", run.root, "--prompt", "").returncode == 2
    exported = pipeline("export", run.root)
    assert (exported.returncode, exported.stdout.strip()) == (0, str(run.export)), exported.stderr
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in run.export.iterdir()}

    changed = pipeline("submit", micro, "seed=2", "model.hidden_size=64", "pretrain.time=5", "--cluster", "local")
    assert changed.returncode == 2
    assert "seed" in changed.stderr
    assert "model.hidden_size" in changed.stderr
    assert "pretrain.time" not in changed.stderr

    longer = pipeline("submit", micro, "pretrain.max_steps=24", "--cluster", "local")
    assert longer.returncode == 0, longer.stderr
    assert run.checkpoint_steps()[-1] == 24
    assert "step-00000024" in final_scores(run)


def test_dry_run_writes_nothing_and_prints_the_literal_lines(pipeline: Pipeline, micro: Path, run: Run) -> None:
    result = pipeline("submit", micro, "--cluster", "local", "--dry-run")
    assert result.returncode == 0
    assert f"bash {run.snapshot}/sbatch/pretrain.sbatch {run.root}" in result.stdout
    assert not run.root.exists()


def test_interrupt_saves_and_the_next_call_goes_on(micro: Path, run: Run, pipeline: Pipeline) -> None:
    chain = start(micro, "pretrain.max_steps=2000", "pretrain.save_interval=1000")
    wait_for(lambda: len(steps_logged(run)) > 3)
    chain.send_signal(signal.SIGINT)
    output, _ = chain.communicate(timeout=60)
    assert chain.returncode == 130, output
    assert "pipeline resume" in output
    last = run.checkpoint_steps()[-1]
    assert last > 0
    assert not processes_of(run)
    assert [r["verdict"] for r in map(read_json, run.attempts.glob("2.0/verdict.json"))] == ["stopped"]

    assert pipeline("stop", run.root).returncode == 0
    refused = pipeline("submit", run.root, "--cluster", "local")
    assert refused.returncode == 1
    assert "was stopped" in refused.stderr
    resumed = start(run.root, verb="resume")
    wait_for(lambda: read_lines(run.events)[-1]["event"] == "resume")
    assert not run.stop.exists()
    resumed.send_signal(signal.SIGTERM)
    resumed.communicate(timeout=60)


def test_killed_scheduler_leaves_no_process_and_the_twin_is_equal(
    micro: Path, run: Run, pipeline: Pipeline, tmp_path: Path
) -> None:
    # Enough steps that the chain is in the middle of them when it is hit.
    long = ("pretrain.max_steps=150", "pretrain.save_interval=20")
    chain = start(micro, *long)
    wait_for(lambda: len(steps_logged(run)) > 15)
    os.kill(chain.pid, signal.SIGKILL)
    chain.communicate(timeout=60)
    wait_for(lambda: not processes_of(run))
    resumed = pipeline("submit", run.root, "--only", "pretrain", "--cluster", "local")
    assert resumed.returncode == 0, resumed.stderr

    twin = Run(tmp_path / "runs" / "twin")
    for stage in ("tokenize", "pretrain"):
        result = pipeline("submit", micro, *long, "name=twin", "--cluster", "local", "--only", stage)
        assert result.returncode == 0, result.stderr
    assert losses(run) == losses(twin)
    assert weights(run, 150) == weights(twin, 150)


def test_two_ranks_see_the_same_batches(micro: Path, run: Run, pipeline: Pipeline, tmp_path: Path) -> None:
    for name, ranks in (("micro", 2), ("one", 1)):
        for stage in ("tokenize", "pretrain"):
            wanted = (f"name={name}", f"pretrain.nproc_per_node={ranks}", "pretrain.max_steps=4")
            result = pipeline("submit", micro, *wanted, "--cluster", "local", "--only", stage)
            assert result.returncode == 0, result.stderr
    one = losses(Run(tmp_path / "runs" / "one"))
    assert losses(run) == [(step, pytest.approx(loss, rel=1e-4)) for step, loss in one]


def test_a_second_scheduler_is_refused(micro: Path, run: Run, pipeline: Pipeline) -> None:
    chain = start(micro, "pretrain.max_steps=5000")
    wait_for(lambda: run.config.is_file() and (run.control / "scheduler.json").is_file())
    second = pipeline("submit", micro, "pretrain.max_steps=5000", "--cluster", "local")
    assert second.returncode == 3
    assert f"held by process {chain.pid}" in second.stderr
    os.killpg(chain.pid, signal.SIGTERM)
    chain.communicate(timeout=60)


def test_a_failing_stage_ends_the_chain_and_names_its_log(
    micro: Path, run: Run, pipeline: Pipeline, corpus: Path
) -> None:
    result = pipeline("submit", micro, "tokenize.vocab_size=30000", "--cluster", "local")
    assert result.returncode == 1
    assert "tokenize  failed" in result.stderr
    assert str(run.log("tokenize", "1", 0)) in result.stderr
    assert "Traceback" not in result.stderr + run.log("tokenize", "1", 0).read_text()
    assert not run.checkpoints.exists()


def test_a_job_script_runs_by_hand(micro: Path, run: Run, pipeline: Pipeline) -> None:
    assert pipeline("submit", micro, "--cluster", "local", "--only", "tokenize").returncode == 0
    script = run.snapshot / "sbatch" / "pretrain.sbatch"
    by_hand = subprocess.run(
        ["bash", str(script), str(run.root)], capture_output=True, text=True,
        env=environment(RANK="3", WORLD_SIZE="9", SLURM_JOB_ID="17"), timeout=120, check=False,
    )  # fmt: skip
    assert by_hand.returncode == 0, by_hand.stderr
    assert run.checkpoint_steps()[-1] == 20
    assert read_json(run.verdict("hand-pretrain", 0))["verdict"] == "complete"
