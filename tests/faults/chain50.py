"""A chain of 50 Segments of some 20 s on a private Slurm, hurt ten times, with nobody who mends it; equal to its twin.

`python tests/faults/chain50.py [--segments N] [--faults N] [--seed N] [--away SECONDS]`. Each Segment is told to end as a
time limit would, once it has made its steps. In ten of them something else happens before, chosen by the seed: a second
start, a Job that is cancelled, a process that is killed, a node or the controller that is gone, a record that is torn.
In the middle the controller is away for `--away` seconds around an end. Nothing is ever submitted or resumed to mend it.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests" / "faults"), str(PROJECT / "tests" / "slurm")]

import table  # noqa: E402
from driven_chain import DrivenChain, make_twin, write_corpus  # noqa: E402
from private_slurm import PrivateSlurm  # noqa: E402
from slurm_packages import reason  # noqa: E402

from pipeline.run.goodput import read_split  # noqa: E402

EACH = 30  # steps of a Segment
STEP_SECONDS = 0.25
LONGEST = 300  # seconds for a Segment, with what goes wrong in it; a node that died takes a minute
FAILS = 'if [[ -e $0.fails ]]; then rm "$0.fails"; echo "Unable to contact slurm controller" >&2; exit 1; fi'
Chance = random.Random


def cancel_what_waits(chain: DrivenChain, job: str, chance: Chance) -> None:
    chain.slurm.run("scancel", chain.waiting())


def start_by_hand(chain: DrivenChain, job: str, chance: Chance) -> None:
    chain.sbatch_by_hand()


def requeue_a_finished_one(chain: DrivenChain, job: str, chance: Chance) -> None:
    chain.slurm.run("scontrol", "update", f"JobId={job}", "Requeue=1")  # Slurm would refuse to requeue it
    chain.warn(job)
    chain.wait_for("its end", lambda: chain.state_of(job) not in ("RUNNING", "COMPLETING"), 60)
    chain.slurm.run("scontrol", "requeue", job)


def orphan(chain: DrivenChain, job: str, chance: Chance) -> None:
    """Submit a Job once more, as after an answer that was not heard."""
    queued = next(found for found in chain.queue("pretrain") if found.job_id == job)
    chain.sbatch_by_hand(f"--job-name={queued.name}", f"--comment={queued.comment}", "--dependency=singleton")


def submit_again(chain: DrivenChain, job: str, chance: Chance) -> None:
    chain.verb("submit", chain.config, "--cluster", chain.cluster)


def resume_again(chain: DrivenChain, job: str, chance: Chance) -> None:
    chain.verb("resume", chain.run.root)


def kill_the_script(chain: DrivenChain, job: str, chance: Chance) -> None:
    os.kill(chain.script_pid(job), signal.SIGKILL)


def kill_the_rank(chain: DrivenChain, job: str, chance: Chance) -> None:
    os.kill(chain.rank_pid(), signal.SIGKILL)


def kill_all_of_it(chain: DrivenChain, job: str, chance: Chance) -> None:
    chain.kill(job)


def controller_is_away(chain: DrivenChain, job: str, chance: Chance) -> None:
    away_around_an_end(chain, job, chance.uniform(20, 60))


def away_around_an_end(chain: DrivenChain, job: str, seconds: float) -> None:
    chain.slurm.stop_controller()
    chain.warn_without_controller(job)
    chain.controller_away(seconds)


def node_dies(chain: DrivenChain, job: str, chance: Chance) -> None:
    """Kill the slurmd of the Job's node, whose processes live on, and bring it back when Slurm has given the Job up."""
    node = chain.slurm.job(job)["NodeList"]
    chain.slurm.kill_node(node)
    chain.wait_for("Slurm to give the Job up", lambda: chain.slurm.job(job)["JobState"] != "RUNNING", 120)
    time.sleep(chance.uniform(0, 10))
    chain.slurm.revive_node(node)


def preemption(chain: DrivenChain, job: str, chance: Chance) -> None:
    chain.slurm.submit("sleep 5", "--partition=high", f"--nodes={len(chain.slurm.nodes)}", "--exclusive")


def torn_record(chain: DrivenChain, job: str, chance: Chance) -> None:
    """Cut a record of an attempt or a Job, the running ones' too, in the middle, or to nothing; then kill the attempt."""
    names = ("attempts/**/*.json", "attempts/**/*.begin", "jobs/*.json", "jobs.json")
    paths = sorted(path for name in names for path in chain.run.root.glob(name) if path.is_file())
    path = chance.choice(sorted(paths, key=lambda path: path.stat().st_mtime)[-3:])
    content = path.read_bytes()
    path.write_bytes(content[: chance.choice([0, len(content) // 2])])
    print(f"    torn: {path.relative_to(chain.run.root)}", flush=True)
    chain.kill(job)


def disk_is_full_at_the_next_beginning(chain: DrivenChain, job: str, chance: Chance) -> None:
    chain.on("pipeline.host.jobscript begin * pretrain", "ulimit -f 0", once=True)


def next_script_ends_in_its_middle(chain: DrivenChain, job: str, chance: Chance) -> None:
    chain.exit_in_the_middle()


def sbatch_fails(chain: DrivenChain, job: str, chance: Chance) -> None:
    for command in ("sbatch", "scontrol", "squeue"):
        (chain.stubs / f"{command}.fails").touch()


FAULTS: dict[str, Callable[[DrivenChain, str, Chance], None]] = {
    "the waiting Segment is cancelled": cancel_what_waits,
    "the script is started by hand": start_by_hand,
    "a finished Segment is requeued": requeue_a_finished_one,
    "an orphan with our token": orphan,
    "submit once more": submit_again,
    "resume once more": resume_again,
    "SIGKILL to the script": kill_the_script,
    "SIGKILL to a rank": kill_the_rank,
    "SIGKILL to script and rank": kill_all_of_it,
    "the controller is away around an end": controller_is_away,
    "a node dies, its processes live on": node_dies,
    "preemption": preemption,
    "a torn record, and SIGKILL": torn_record,
    "a full disk at the next beginning": disk_is_full_at_the_next_beginning,
    "the next script ends in its middle": next_script_ends_in_its_middle,
    "sbatch, scontrol and squeue fail once": sbatch_fails,
}


def schedule(options: argparse.Namespace, chance: Chance) -> dict[int, str]:
    """Return which Segments are hurt, and how: each fault once before one comes again; not the first two, nor the last."""
    places = chance.sample(range(3, options.segments), min(options.faults, options.segments - 3))
    names = [name for _ in range(1 + len(places) // len(FAULTS)) for name in chance.sample(list(FAULTS), len(FAULTS))]
    return dict(zip(sorted(places), options.fault or names, strict=False))


def reach(chain: DrivenChain, step: int) -> None:
    """Wait for a step; fail at once where nothing of the chain is queued any more."""
    idle = 0

    def reached() -> bool:
        nonlocal idle
        idle = 0 if chain.alive() else idle + 1
        assert idle < 10, f"nothing is queued at step {chain.step()}\n{chain.logs()}"
        return chain.step() >= step

    chain.wait_for(f"step {step}", reached, LONGEST, 1.0)


def drive(chain: DrivenChain, options: argparse.Namespace, chance: Chance) -> None:
    """Let the chain go through its Segments, with something that happens in ten of them."""
    planned, began = schedule(options, chance), time.monotonic()
    for number in range(1, options.segments + 1):
        reach(chain, EACH * number - EACH // 2)
        job, name = chain.running(), planned.get(number, "")
        at = f"{time.monotonic() - began:5.0f} s  Segment {number:2}, step {chain.step():4}, job {job}"
        print(f"{at}{': ' * bool(name)}{name}", flush=True)
        if name:
            FAULTS[name](chain, job, chance)
        if number == options.segments // 2 and options.away:
            print(f"    the controller is away for {options.away:.0f} s around an end", flush=True)
            away_around_an_end(chain, chain.running(), options.away)
        if number < options.segments:
            reach(chain, EACH * number)
            chain.slurm.run("scancel", "--signal=USR2", "--batch", chain.running(), check=False)


def checks(chain: DrivenChain, twin: DrivenChain) -> dict[str, bool]:
    """Return what must be true in the end."""
    result, expected = chain.result(), twin.result()
    jobs = chain.queue()
    return {
        **{f"{what} equal the twin's": result[what] == expected[what] for what in expected},
        "evaluate and inference ran once, on the whole model": chain.samples() == [chain.steps],
        "nothing is left in the queue": not any(job.alive for job in jobs),
        "status says completed": chain.status()["state"] == "completed",
        "no temporary file left": not [p for p in chain.run.root.rglob("*") if re.search(r"\.(tmp|old)$", p.name)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segments", type=int, default=50)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument(
        "--fault", action="append", choices=list(FAULTS), metavar="NAME", help="in place of random ones"
    )
    parser.add_argument("--seed", type=int, default=None, help="printed; a random one by default")
    parser.add_argument("--away", type=float, default=0, help="seconds that the controller is away in the middle")
    options = parser.parse_args()
    if why := prepare():
        table.skip("chain50", why)
        return 0
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="chain50-") as folder, tempfile.TemporaryDirectory(dir="/tmp") as place:
        write_corpus(Path(folder) / "corpus")
        with PrivateSlurm(Path(place), 3) as slurm:
            return run(slurm, Path(folder), options, Chance(seed), seed)


def prepare() -> str:
    """Install Slurm where that can be done; return why there is none otherwise."""
    subprocess.run([sys.executable, str(PROJECT / "tests" / "slurm" / "slurm_packages.py")], check=False)
    return reason()


def run(slurm: PrivateSlurm, folder: Path, options: argparse.Namespace, chance: Chance, seed: int) -> int:
    """Run the twin and the chain, print what is equal, and return the exit code."""
    steps = EACH * options.segments
    twin = make_twin(slurm, folder, steps=steps)
    chain = DrivenChain(slurm, folder, "chain50", steps=steps)
    for command in ("sbatch", "scontrol", "squeue"):
        chain.stub(command, FAILS)
    try:
        chain.submit(slow=STEP_SECONDS)
        drive(chain, options, chance)
        chain.finish(LONGEST)
        done = checks(chain, twin)
    except Exception as error:  # whatever it was, the row is to say it
        print(error, flush=True)
        table.add("chain50", False, f"seed {seed}: {str(error).splitlines()[0]}")
        return 1
    for what, right in done.items():
        print(f"{'ok' if right else 'FAILED':7} {what}")
    split, wrong = read_split(chain.run), "; ".join(what for what, right in done.items() if not right)
    said = f"seed {seed}, {len(chain.training())} attempts trained, {options.faults} faults"
    return 0 if table.add("chain50", not wrong, wrong or said, split.goodput if split else None) else 1


if __name__ == "__main__":
    sys.exit(main())
