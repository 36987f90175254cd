"""Train for N minutes with a random fault every M seconds, and compare with an undisturbed twin.

`python tests/faults/soak.py --minutes 30 --every 120 --seed 0`. Faults: SIGKILL, SIGSTOP (the watchdog ends it), SIGTERM
and SIGUSR2 to a rank, the launcher or the job script. At the end losses and weights must be the twin's, the account of
the time must add up to the wall time within 1 %, the steps that count must have had `--goodput` of it, and no process or
temporary file may be left. Steps are held up to `--step-seconds`, as long as real ones; the twin's are not, so that it
needs a few minutes only.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests"), str(PROJECT / "tests" / "faults")]

import table  # noqa: E402
from by_hand import Attempt, events, losses, make_data, make_run, processes_of, ranks_of, weights  # noqa: E402
from micro import write_corpus  # noqa: E402

from pipeline.files import read_lines  # noqa: E402
from pipeline.run.folder import Run  # noqa: E402
from pipeline.run.goodput import read_split  # noqa: E402

SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGUSR2)
KEYS = (
    "pretrain.hang_timeout=5", "pretrain.first_step_timeout=60", "pretrain.log_interval=10", "pretrain.keep_last=2",
    "pretrain.save_interval=20", "pretrain.straggler_threshold=1000",
)  # fmt: skip


def hit(run: Run, attempt: Attempt, chance: random.Random) -> str:
    """Send one signal to one process of the attempt; say which."""
    ranks = ranks_of(run)
    names = {f"rank {rank}": pid for rank, pid in sorted(ranks.items())}
    for pid, line in processes_of(run).items():
        if "torch.distributed.run" in line:
            names["launcher"] = pid
    names["job script"] = attempt.process.pid
    name, number = chance.choice(list(names)), chance.choice(SIGNALS)
    if number == signal.SIGSTOP and not name.startswith("rank"):
        number = signal.SIGKILL  # a stopped launcher holds up nothing
    if number == signal.SIGSTOP and len(ranks) == 1:
        number = signal.SIGKILL  # alone, it has nobody to notice
    try:
        os.kill(names[name], number)
    except ProcessLookupError:
        return "missed: it had just ended"
    return f"{number.name} to {name}"


def disturb(run: Run, steps: int, slow: str, options: argparse.Namespace) -> int:
    """Start attempts until training is complete, with a fault every `every` seconds for `minutes`; return how many."""
    chance, end, every = random.Random(options.seed), time.monotonic() + 60 * options.minutes, options.every
    next_fault, faults = time.monotonic() + every / 2, 0
    for number in range(1000):
        attempt = Attempt(run, number=number, inject=slow)
        said = ""
        while attempt.process.poll() is None:
            if not said and next_fault < time.monotonic() < end and ranks_of(run):
                faults += 1
                said, next_fault = hit(run, attempt, chance), time.monotonic() + every * chance.uniform(0.7, 1.3)
            time.sleep(0.1)
        deadline = time.monotonic() + 60
        while processes_of(run):  # of a killed job script: they end by themselves
            assert time.monotonic() < deadline, processes_of(run)
            time.sleep(0.1)
        step = max((row["step"] for row in read_lines(run.metrics)), default=0)
        print(
            f"attempt {number:3}: {said or 'no fault':28} -> {attempt.verdict.get('verdict', 'none'):9} step {step}",
            flush=True,
        )
        if steps in run.checkpoint_steps():
            return faults
    raise AssertionError("a thousand attempts and no end")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--step-seconds", type=float, default=0.25)
    parser.add_argument("--goodput", type=float, default=0.8, help="share of the wall time that counts as passed")
    options = parser.parse_args()
    # A fifth of a step more for its own work, a fifth of the time for faults: about the minutes that are wanted.
    steps = round(options.minutes * 60 * 0.8 / (options.step_seconds * 1.2), -1)
    slow = ";".join(f"rank={rank},step=1,do=slow,seconds={options.step_seconds}" for rank in range(options.ranks))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_corpus(root / "corpus")
        config = make_data(root, root / "corpus")
        keys = (*KEYS, f"pretrain.nproc_per_node={options.ranks}", f"pretrain.max_steps={steps:.0f}")
        run, twin = make_run(config, "soak", *keys), make_run(config, "twin", *keys)
        faults = disturb(run, int(steps), slow, options)
        if Attempt(twin).wait(60 * options.minutes + 600) != 0:
            return 1
        return report(run, twin, int(steps), faults, options)


def report(run: Run, twin: Run, steps: int, faults: int, options: argparse.Namespace) -> int:
    """Print what the time went into and what is equal; return the exit code."""
    split = read_split(run)
    assert split is not None
    print(f"{'kind':10} {'seconds':>8} {'share':>7}")
    for kind, seconds in split.to_json().items():
        print(f"{kind:10} {seconds:8.1f} {seconds / split.wall:7.1%}")
    spanned = read_lines(run.events)[-1]["time"] - events(run, "start")[0]["began"]
    checks = {
        "losses equal the twin's": losses(run) == losses(twin),
        "weights equal the twin's": weights(run, steps) == weights(twin, steps),
        f"time adds up: {split.wall:.1f} s of {spanned:.1f} s": abs(split.wall - spanned) <= 0.01 * spanned,
        f"goodput {split.goodput or 0:.1%} is {options.goodput:.0%} or more": (split.goodput or 0) >= options.goodput,
        "no process left": not processes_of(run),
        "no temporary file left": not [p for p in run.root.rglob("*") if p.name.endswith((".tmp", ".old"))],
    }
    for what, right in checks.items():
        print(f"{'ok' if right else 'FAILED':7} {what}")
    wrong = "; ".join(what for what, right in checks.items() if not right)
    said = f"{faults} faults in {split.wall / 60:.1f} min, {steps} steps"
    print(f"goodput {split.goodput or 0:.1%}: {said}")
    return 0 if table.add("soak", not wrong, wrong or said, split.goodput) else 1


if __name__ == "__main__":
    sys.exit(main())
