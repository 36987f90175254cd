"""What can go wrong with Slurm's commands, and what to do then."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.errors import EXIT_USAGE, NotReadyError

LOGIN_HINT = "load Slurm's commands (often: module load slurm), or write login in the cluster file"

REFUSED = re.compile(
    r"^((sbatch|scontrol|scancel): (error|fatal|unrecognized|invalid|ambiguous|option)|allocation failure)", re.M
)
NO_ANSWER = re.compile(
    r"[Ss]ocket timed out|[Uu]nable to contact|[Cc]onnection (refused|reset|closed|timed out)|Zero Bytes|"
    r"[Tt]ransport endpoint|temporarily (unavailable|unable)|[Cc]ommunication (connection )?failure|No route to host|"
    r"[Uu]nable to establish|backup controller|Slurmctld.*(down|DOWN)|Broken pipe"
)
REMEDIES = [
    (NO_ANSWER, "the controller does not answer; try again in a minute, and ask it: scontrol ping"),
    (re.compile(r"[Mm]unge|authentication|[Pp]rotocol"), "check that munge runs here and that the clocks agree"),
    (
        re.compile(r"submit limit|violates"),
        "a limit of the account or QOS is reached: wait, cancel Jobs, or mend qos",
    ),
    (re.compile(r"[Pp]artition"), "see `sinfo -s`, and mend partition below sbatch"),
    (
        re.compile(r"[Aa]ccount|[Aa]ssociation"),
        "see `sacctmgr show associations user=$USER`, and mend account below sbatch",
    ),
    (re.compile(r"[Qq]OS|[Qq]uality"), "see `sacctmgr show qos`, and mend qos below sbatch"),
    (re.compile(r"generic resource|GRES|gres"), "see `sinfo -o '%P %G'`, and mend gpus_per_node, gpu_type or gpu_flag"),
    (
        re.compile(r"node configuration|[Mm]emory|--mem"),
        "no node has that much; see `sinfo -o '%P %c %m %G'`, ask for less",
    ),
    (re.compile(r"unrecognized option|invalid option"), "mend the option below sbatch; see `sbatch --help`"),
    (re.compile(r"[Tt]ime limit"), "see the limit in `sinfo -o '%P %l'`, and lower the stage's time"),
    (re.compile(r"array"), "the array is too large; see MaxArraySize in `scontrol show config`"),
]


class SlurmError(NotReadyError):
    """A command of Slurm's is missing, hangs or fails. `answer` is what it said."""

    def __init__(self, words: Sequence[str], answer: str, remedy: str = "") -> None:
        self.words, self.answer = list(words), answer.strip()
        remedy = remedy or next((text for pattern, text in REMEDIES if pattern.search(answer)), "")
        said = self.answer or "it said nothing"
        super().__init__(f"{shlex.join(words)}\n{said}" + (f"\nWhat to do: {remedy}" if remedy else ""))


class SlurmRefused(SlurmError):
    """Slurm does not take the request as it is: asking again is no use."""

    exit_code = EXIT_USAGE


class Answer(NamedTuple):
    """What a command said. `code` is None where it hung and was ended."""

    code: int | None
    output: str
    talk: str


def said_by(answer: Answer) -> str:
    """Return all that a command said."""
    said = "\n".join(text.strip() for text in (answer.talk, answer.output) if text.strip())
    return said or f"it ended with exit code {answer.code} and said nothing"


def is_refusal(answer: Answer) -> bool:
    """Tell whether Slurm looked at the request and does not take it, from what passes by itself."""
    if not answer.code:
        return False
    return bool(REFUSED.search(answer.talk)) and not NO_ANSWER.search(answer.talk)
