# ruff: noqa: E402
"""Time the submission of a chain of six Jobs against six bare sbatch calls with the same options, interleaved.

`nox -s bench -- submit [--rounds N]`. Starts a private Slurm of its own (as root; see tests/slurm), whose one node is
drained: nothing runs. Ends with a JSON line; a ratio above 1 would be in our favour, and the goal is 0.83, which is 1.2
times the bare calls.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests" / "slurm")]

from private_slurm import PrivateSlurm
from slurm_packages import reason

from pipeline.submit.ask import request
from pipeline.submit.run_folder import prepare
from pipeline.submit.to_slurm import Submission

CLUSTER = "scheduler: slurm\nsbatch: {partition: main, mem: 100M}\n"


def ours(folder: Path, number: int) -> tuple[float, list[list[str]]]:
    """Submit one Run; return the seconds from the prepared Run to the last id, and the lines that were submitted."""
    config = f"name: run{number}\nruns_dir: {folder}/runs\npretrain: {{segments: 3}}\n"
    (folder / "config.yaml").write_text(config)
    wanted = request([str(folder / "config.yaml")], str(folder / "site.yaml"), None)
    is_new = prepare(wanted.run, wanted.config, wanted.plan, wanted.cluster)
    submission = Submission(
        wanted.run, wanted.config, wanted.cluster, wanted.plan, wanted.cluster.slurm(), is_new=is_new
    )
    lines = submission.commands()
    started = time.perf_counter()
    submission.submit(lambda text: None)
    return time.perf_counter() - started, lines


def bare(lines: list[list[str]]) -> float:
    """Give the same lines to sbatch, as a shell script would, each after the one before."""
    started = time.perf_counter()
    last = ""
    for words in lines:
        flags = [word for word in words if not word.startswith("--dependency=")]
        edge = [f"--dependency=afterany:{last}"] if last else []
        done = subprocess.run([*flags[:-2], *edge, *flags[-2:]], capture_output=True, text=True, check=True)
        last = done.stdout.strip()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    if why := reason():
        sys.exit(why)
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    folder.chmod(0o755)  # munge wants its socket to be reached by all
    try:
        (folder / "site.yaml").write_text(CLUSTER)
        with PrivateSlurm(folder / "slurm", 1) as slurm:
            os.environ.clear()
            os.environ.update(slurm.env)
            slurm.run("scontrol", "update", "nodename=n1", "state=drain", "reason=bench")
            times: dict[str, list[float]] = {"ours": [], "bare": []}
            for number in range(rounds):
                seconds, lines = ours(folder, number)
                times["ours"].append(seconds)
                times["bare"].append(bare(lines))
        middle = {name: statistics.median(values) for name, values in times.items()}
        print(f"6 Jobs: ours {middle['ours']:.3f} s, bare sbatch {middle['bare']:.3f} s (medians of {rounds})")
        figure = {
            "benchmark": "submit", "ours": round(middle["ours"], 4), "unit": "s for 6 Jobs",
            "best_peer": round(middle["bare"], 4), "peer": "sbatch", "ratio": round(middle["bare"] / middle["ours"], 3),
            "runs": rounds,
        }  # fmt: skip
        print(json.dumps(figure))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
