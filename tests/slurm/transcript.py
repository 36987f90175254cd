"""Disturb a Run on the private Slurm in every way it promises to survive, and print what a person sees at each point.

`python tests/slurm/transcript.py > docs/transcript.md`, as root; about eight minutes, most of them waiting. Job ids, times and host
names are as they came; the Run's folder is shortened.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

from private_slurm import PrivateSlurm  # noqa: E402
from test_chain import PROJECT, STEPS, Chain  # noqa: E402

from pipeline.files import read_json, read_lines  # noqa: E402

HEAD = """\
# A transcript

Written by `tests/slurm/transcript.py`: one Run of two nodes on a private Slurm of three, which is preempted, loses a node
and meets its time limit. Steps are made to last four seconds, so that there is time for all this. The result is compared
with that of an undisturbed twin at the end.
"""


class Transcript:
    def __init__(self, chain: Chain) -> None:
        self.chain = chain

    def say(self, text: str) -> None:
        print(f"\n## {text}\n", flush=True)

    def show(self, *words: str) -> None:
        """Run one verb of the product and print it with its output, as from a terminal."""
        done = subprocess.run(
            self.chain.command(*words),
            env=self.chain.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        shown = " ".join(words)
        output = (done.stdout + done.stderr).rstrip()
        text = f"$ python -m pipeline {shown}\n{output}".replace(str(self.chain.folder) + "/", "")
        print(
            "\n".join(f"    {line}".rstrip() for line in text.replace(sys.executable, "python").splitlines()),
            flush=True,
        )

    def status(self) -> None:
        self.show("status", str(self.chain.run.root))


def corpus(folder: Path) -> None:
    (folder / "corpus").mkdir()
    for path in sorted((PROJECT / "pipeline" / "lm").glob("*.py"))[:24]:
        (folder / "corpus" / path.name).write_text(path.read_text())


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)  # munge wants its socket to be reached by all
        corpus(folder)
        with PrivateSlurm(folder / "s") as slurm:
            twin, chain = Chain(slurm, folder, "twin"), Chain(slurm, folder, "mine")
            twin.submit()
            twin.wait_for_state("completed")
            print(HEAD, end="")
            tell(Transcript(chain), slurm)
            same = chain.result() == twin.result()
        word = "are equal to" if same else "DIFFER from"
        print(f"\nLosses, weights, optimizer state and score {word} the twin's, bit for bit.")
        if not same:
            sys.exit(1)


def tell(transcript: Transcript, slurm: PrivateSlurm) -> None:
    chain = transcript.chain
    transcript.say("Submitted")
    transcript.show("submit", str(chain.config), "--cluster", str(chain.cluster), "pretrain.time=3:00")
    chain.slow(4.0)
    chain.wait_for_step(3)
    transcript.status()
    transcript.say("A Job of higher priority takes the nodes")
    high = slurm.submit("sleep 8", "--partition=high", "--nodes=3", "--exclusive")
    slurm.wait_for(high, "RUNNING", "COMPLETED", timeout=60)
    time.sleep(2)
    transcript.status()
    second = chain.job("pretrain", 2)
    chain.wait_for("the second Segment", lambda: chain.run.beginning(second, 0).is_file(), 120)
    chain.wait_for_step(max(row["step"] for row in read_lines(chain.run.metrics)) + 2)
    transcript.say("A node dies")
    node = read_json(chain.run.beginning(second, 0))["nodes"][1]
    slurm.kill_node(node)
    third = chain.job("pretrain", 3)
    chain.wait_for("the third Segment", lambda: chain.run.beginning(third, 0).is_file(), 150)
    transcript.status()
    transcript.say("The time limit")
    chain.wait_for("the third Segment's end", chain.run.verdict(third, 0).is_file, 240)
    chain.wait_for("the fourth Segment", lambda: chain.run.beginning(chain.job("pretrain", 4), 0).is_file(), 60)
    transcript.status()
    transcript.say("The end")
    chain.wait_for_state("completed", 400)
    transcript.status()
    steps = [event.get("step") for event in chain.events("resume")]
    print(
        f"\nIt went on from steps {', '.join(map(str, steps))} of {STEPS}. What it wrote down on the way, in events.jsonl:\n"
    )
    for event in read_lines(chain.run.events):
        if event["event"] in ("straggler", "injected", "save"):
            continue
        rest = {key: value for key, value in event.items() if key not in ("time", "event", "host", "began")}
        line = f"    {event['event']:12} {event['host']:4} " + " ".join(f"{key}={value}" for key, value in rest.items())
        print(line.replace(str(chain.folder) + "/", "")[:150])


if __name__ == "__main__":
    main()
