"""The way in to a cluster from elsewhere, found out by trying it."""

from __future__ import annotations

import shlex

from pipeline.cluster.parts import Login
from pipeline.errors import NotReadyError, UserError
from pipeline.slurm.commands import Quoting, Slurm
from pipeline.slurm.errors import said_by

# Words that a shell changes where they reach it bare, and that do nothing in any of its readings.
WORDS = ("a  b", "$HOME", "it's")
HOME = 'printf "%s\\n" "$HOME"'
SECONDS = 60  # a first connection may ask for a second factor


def open_login(text: str) -> Login:
    """Find out how the prefix `ssh login01` wants its words quoted, and where Runs may lie over there."""
    try:
        prefix = shlex.split(text)
    except ValueError as error:
        raise UserError(f"--login {text}: {error}") from None
    if not prefix:
        raise UserError("--login: is empty; write the words before a command over there, such as --login 'ssh login01'")
    quoting = find_quoting(prefix)
    home = Slurm(tuple(prefix), quoting).run(["sh", "-c", HOME]).splitlines()[0]
    return Login(prefix=prefix, quoting=quoting, root=f"{home.rstrip('/')}/runs")


def find_quoting(prefix: list[str]) -> Quoting:
    """Return the quoting by which words arrive over there as they are; NotReadyError if by none."""
    said = {}
    for quoting in ("one-string", "two-strings", "argv"):
        answer = Slurm(tuple(prefix), quoting).ask(["printf", "%s\\n", *WORDS], SECONDS)
        if answer.output.splitlines() == list(WORDS):
            return quoting
        said[quoting] = said_by(answer)
    told = "\n".join(f"  {quoting}: {text.splitlines()[-1]}" for quoting, text in said.items())
    raise NotReadyError(
        f"{shlex.join(prefix)}: words do not arrive over there as they are, with any quoting:\n{told}\n"
        "What to do: try the prefix by hand, with `true` after it. Nothing but the command's own words may be printed"
    )
