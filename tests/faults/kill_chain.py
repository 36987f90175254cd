"""Kill a chain with SIGKILL in each of its stages, again and again, and compare its results with an undisturbed twin.

`python tests/faults/kill_chain.py [--kills N] [--seed N]`. Every round kills everything that belongs to the Run, in no
order: the scheduler, the job script, the stage. Then the same command is given again. The moments are random ones of
each stage. At the end tokens, losses, weights, scores and samples must be those of the twin, and no process, temporary
file or foreign checkpoint may be left.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests"), str(PROJECT / "tests" / "faults")]

import table  # noqa: E402
from micro import MICRO, environment, write_corpus  # noqa: E402

from pipeline.files import read_json, read_lines  # noqa: E402
from pipeline.plan.jobs import STAGES  # noqa: E402
from pipeline.run.folder import Run  # noqa: E402
from pipeline.run.goodput import read_split  # noqa: E402

OVERRIDES = (
    "pretrain.max_steps=400",
    "pretrain.save_interval=40",
    "pretrain.keep_last=2",
    "inference.max_new_tokens=24",
)
CHAIN_SECONDS = 300


def start(config: Path, name: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "pipeline",
        "submit",
        str(config),
        f"name={name}",
        *OVERRIDES,
        "--cluster",
        "local",
    ]
    log = (config.parent / f"{name}.log").open("ab")
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment(), start_new_session=True)


def processes_of(run: Run) -> list[int]:
    """List the pids whose command line or environment names the Run's folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(run.root) in line:
            found.append(int(folder.name))
    return found


def kill_all(chain: subprocess.Popen[bytes], run: Run, shuffle: random.Random) -> None:
    """SIGKILL the scheduler and all that it started, in random order; again, for what was just being started."""
    pids, deadline = [chain.pid, *processes_of(run)], time.monotonic() + 30
    while pids:
        assert time.monotonic() < deadline, f"still there: {pids}"
        shuffle.shuffle(pids)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            time.sleep(shuffle.choice([0, 0, 0.05]))
        chain.wait(timeout=30)
        time.sleep(0.1)
        pids = processes_of(run)


def spread(kills: int, chance: random.Random) -> list[tuple[str, float]]:
    """Return stage and share of its time for each kill: every stage gets its part, pretrain what is left over."""
    counts = {stage: kills // (len(STAGES) + 1) for stage in STAGES}
    counts["pretrain"] += kills - sum(counts.values())
    return [
        (stage, share) for stage in STAGES for share in sorted(chance.uniform(0, 0.5) for _ in range(counts[stage]))
    ]


def running_stage(run: Run, since: float) -> str | None:
    """Return the stage that was started last, if it was after `since` (unix s) and still runs."""
    for job in (read_json(run.jobs) or {"jobs": []})["jobs"]:
        if job["state"] == "running" and (job["started"] or 0) >= since:
            return str(job["stage"])
    return None


def _place(stage: str | None) -> int:
    return STAGES.index(stage) if stage in STAGES else -1


def seconds_of_stages(run: Run) -> dict[str, float]:
    return {job["stage"]: job["ended"] - job["started"] for job in read_json(run.jobs)["jobs"]}


def kill_in(stage: str, seconds: float, config: Path, run: Run, shuffle: random.Random) -> str:
    """Start the chain, kill it `seconds` after `stage` has begun; return where it was."""
    since, deadline = time.time(), time.monotonic() + CHAIN_SECONDS
    chain = start(config, "micro")
    # Or a later one: what was killed may have been complete but for its verdict.
    while _place(running_stage(run, since)) < _place(stage) and chain.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    moment = time.monotonic() + seconds
    while time.monotonic() < moment and running_stage(run, since) == stage and chain.poll() is None:
        time.sleep(0.02)
    place = (running_stage(run, since) or "between two stages") if chain.poll() is None else "already complete"
    kill_all(chain, run, shuffle)
    steps = read_lines(run.metrics)
    print(
        f"kill in {stage}, {seconds:.1f} s after its start: {place}, step {steps[-1]['step'] if steps else 0}",
        flush=True,
    )
    return place


def results(run: Run) -> dict[str, object]:
    """Collect what the twin must have too."""
    manifest = read_json(run.checkpoint(400) / "manifest.json")
    return {
        "tokens": {path.name: path.read_bytes() for path in sorted(run.data.glob("*.bin"))},
        "losses": [(record["step"], record["loss"], record["lr"]) for record in read_lines(run.metrics)],
        "weights": {name: file["sha256"] for name, file in manifest["files"].items() if name.endswith(".bin")},
        "scores": [read_json(path)["nll"] for path in sorted(run.root.glob("scores/step-*/*.json"))],
        "samples": [(record["prompt"], record["completion"]) for record in read_lines(run.samples(400))],
        "checkpoints": sorted(path.name for path in run.checkpoints.iterdir()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shuffle = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_corpus(root / "corpus")
        config = root / "micro.yaml"
        config.write_text(MICRO.format(runs=root / "runs", corpus=root / "corpus"), encoding="utf-8")
        run, twin = Run(root / "runs" / "micro"), Run(root / "runs" / "twin")

        if start(config, "twin").wait(timeout=CHAIN_SECONDS) != 0:
            sys.stderr.write((root / "twin.log").read_text())
            return 1
        seconds = seconds_of_stages(twin)
        print("twin, undisturbed: " + ", ".join(f"{stage} {took:.1f} s" for stage, took in seconds.items()))
        hit: Counter[str] = Counter()
        for stage, share in spread(options.kills, shuffle):
            hit[kill_in(stage, share * seconds[stage], config, run, shuffle)] += 1
        if start(config, "micro").wait(timeout=CHAIN_SECONDS) != 0:
            sys.stderr.write((root / "micro.log").read_text())
            return 1
        if missed := [stage for stage in STAGES if not hit[stage]]:
            print(f"no kill hit {missed}: {dict(hit)}")
        failed = compare(results(run), results(twin), run) or bool(missed) or bool(processes_of(run))
        split = read_split(run)
        table.add(
            f"a chain killed {options.kills} times", not failed, str(dict(hit)), split.goodput if split else None
        )  # fmt: skip
        return int(failed)


def compare(got: dict[str, object], wanted: dict[str, object], run: Run) -> int:
    """Print what is equal and what is not; return the exit code."""
    failed = 0
    for what, value in wanted.items():
        equal = got[what] == value
        failed += not equal
        print(f"{what:12} {'equal' if equal else f'DIFFERENT: {got[what]!r:.500} is not {value!r:.500}'}")
    leftovers = [str(p.relative_to(run.root)) for p in run.root.rglob("*") if p.name.endswith((".tmp", ".old"))]
    print(f"{'leftovers':12} {leftovers or 'none'}")
    print("PASSED" if not failed and not leftovers else "FAILED")
    return int(bool(failed or leftovers))


if __name__ == "__main__":
    sys.exit(main())
