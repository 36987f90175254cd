"""Slurm's commands. No other module calls them."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from pipeline.slurm.environment import FOREIGN_NAMES, job_environment
from pipeline.slurm.errors import LOGIN_HINT, Answer, SlurmError, SlurmFull, SlurmRefused, is_full, is_refusal, said_by
from pipeline.slurm.jobs import (
    CELL,
    COLUMNS,
    SACCT_COLUMNS,
    SlurmJob,
    by_id,
    fields_of,
    from_sacct,
    from_scontrol,
    from_squeue,
    unknown,
)
from pipeline.slurm.node_lists import expand_node_list
from pipeline.slurm.priority import SPRIO_COLUMNS, SSHARE_COLUMNS, Priority, from_sprio, from_sshare
from pipeline.slurm.process import hear

# Through how many shells the prefix passes: none, one as `ssh` and `su -c` do, or two as `ssh login01 su - user -c`.
Quoting = Literal["argv", "one-string", "two-strings"]
Mark = Literal["comment", "name"]
OF_CLUSTERS = frozenset("sbatch squeue scontrol scancel sinfo sacct sprio sshare".split())  # that take --clusters
NAME = "--job-name="
# Columns with a `|` after each, neither padded nor cut (a width of 0); of nodes once for each partition.
NODE_COLUMNS = "NodeList:0|,StateLong:0|,CPUsState:0|,Gres:0|,GresUsed:0|,Partition:0|"
PLANNED_COLUMNS = "JobID:0|,StartTime:0|,SchedNodes:0|,Reason:0|"
JOB_ID = re.compile(r"([0-9]+)(;[^\s;]+)?")


class Partition(NamedTuple):
    """One line of sinfo: the nodes of a partition that are alike. `time_limit` is Slurm's text, `memory` MB."""

    name: str
    is_default: bool
    is_up: bool
    time_limit: str
    nodes: int
    cpus: int
    memory: int
    gres: str


@dataclass(frozen=True)
class Slurm:
    """Slurm's commands, run here, or by `prefix` elsewhere.

    `timeout` is the seconds that a command may take, `pauses` are those between attempts to submit. `cluster` is one of
    several that share a database. `mark` is where a Job shows that it is ours. `carried` names the variables of this
    process that a Job gets beside those that every Job needs.
    """

    prefix: tuple[str, ...] = ()
    quoting: Quoting = "argv"
    timeout: float = 30
    pauses: tuple[float, ...] = (1, 4, 15, 30)
    cluster: str | None = None
    mark: Mark = "comment"
    carried: tuple[str, ...] = ()

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the words that are really run."""
        words = [words[0], *self._clusters(words), *words[1:]]
        if not self.prefix:
            return words
        words = ["env", *(word for name in FOREIGN_NAMES for word in ("-u", name)), "LC_ALL=C", *words]
        text = shlex.join(words)
        quoted = {"argv": words, "one-string": [text], "two-strings": [shlex.quote(text)]}
        return [*self.prefix, *quoted[self.quoting]]

    def _clusters(self, words: Sequence[str]) -> list[str]:
        """Name the cluster; not to itself: its nodes seldom reach the database, where others are looked up."""
        at_home = not self.prefix and os.environ.get("SLURM_CLUSTER_NAME") == self.cluster
        named = self.cluster is not None and words[0] in OF_CLUSTERS and "--version" not in words
        return [f"--clusters={self.cluster}"] if named and not at_home else []

    def ask(self, words: Sequence[str], timeout: float | None = None, input: str | None = None) -> Answer:
        """Run a command and return what came of it, however it ended; SlurmError where there is no such command."""
        run, timeout = self.command(words), self.timeout if timeout is None else timeout
        try:
            # What sbatch finds in its environment becomes the Job's.
            environment = job_environment(self.carried) if words[0] == "sbatch" and not self.prefix else None
            return hear(run, timeout, input or "", bool(self.prefix), environment)
        except FileNotFoundError:
            raise SlurmError(words, f"{run[0]}: no such command here", LOGIN_HINT) from None
        except (OSError, ValueError) as error:  # ValueError: a NUL in a word
            raise SlurmError(words, str(error)) from None

    def run(self, words: Sequence[str], timeout: float | None = None, input: str | None = None) -> str:
        """Run a command and return its output; SlurmError where it fails or hangs."""
        answer = self.ask(words, timeout, input)
        if answer.code == 0:
            return answer.output
        if self.prefix and answer.code == 127:
            raise SlurmError(words, answer.talk or "no such command there", LOGIN_HINT)
        said = answer.talk or answer.output or f"it ended with exit code {answer.code}"
        raise (SlurmRefused if is_refusal(answer) else SlurmError)(words, said)

    # Submitting

    def carrying(self, names: Iterable[str]) -> Slurm:
        """Return the same, whose Jobs get these variables of this process too."""
        return replace(self, carried=tuple(names))

    def submit(self, flags: Sequence[str], script: str, args: Sequence[str], token: str) -> str:
        """Submit a Job and return its id; one Job in the end, whatever becomes of sbatch's answer.

        `token`, kept in the Job's comment, is how a Job is found whose id was not heard. A new submission that is
        wanted beside an earlier one needs a new token.
        """
        words = ["sbatch", "--parsable", f"--comment={token}", *flags, script, *args]
        before = self._with_name_of(flags) if self.mark == "name" else set()
        pauses = [*self.pauses, None]
        for pause in pauses:
            answer = self.ask(words)
            job_id = _job_id(answer)
            if job_id is not None:
                return job_id
            if is_full(answer) or is_refusal(answer):
                raise (SlurmFull if is_full(answer) else SlurmRefused)(words, answer.talk)
            time.sleep(pause or 0)
            try:
                found = self._taken(flags, token, before)
            except SlurmError as error:
                # The Job may be there: to submit again would make two of them.
                raise SlurmError(
                    words,
                    f"{said_by(answer)}\nand squeue, asked whether the Job is there after all: {error.answer}",
                    "give the same command again when `scontrol ping` answers; it takes up what is there",
                ) from error
            if found is not None:
                return found
        raise SlurmError(words, said_by(answer))

    def _taken(self, flags: Sequence[str], token: str, before: set[int]) -> str | None:
        """Return the id of the Job that sbatch made without a word, if it did."""
        if self.mark == "comment":
            return self.find([token]).get(token)
        new = self._with_name_of(flags) - before
        return str(max(new)) if new else None

    def _with_name_of(self, flags: Sequence[str]) -> set[int]:
        """Return the ids of this user's Jobs of the name that these options give."""
        name = next((flag.removeprefix(NAME) for flag in flags if flag.startswith(NAME)), "")
        return {int(whole) for whole, job in self._squeue(["--me"]) if job.name == name}

    def test_only(self, flags: Sequence[str], script: str, args: Sequence[str] = ()) -> str:
        """Ask sbatch when the Job would start, and submit nothing; SlurmRefused where it could never."""
        words = ["sbatch", "--test-only", *flags, script, *args]
        answer = self.ask(words)
        if answer.code == 0:
            return answer.talk.strip() or answer.output.strip()
        raise (SlurmRefused if is_refusal(answer) else SlurmError)(words, said_by(answer))

    def find(self, tokens: Iterable[str]) -> dict[str, str]:
        """Return the ids of this user's Jobs whose comments are among `tokens`.

        Of several with one token, the first that has not ended, else the last.
        """
        wanted = set(tokens)
        found: dict[str, tuple[bool, int]] = {}
        for whole, job in self._squeue(["--me"]):
            rank = (job.gone, -int(whole) if job.gone else int(whole))
            found[job.comment] = min(found.get(job.comment, rank), rank)
        return {token: str(abs(number)) for token, (_, number) in found.items() if token in wanted}

    # Looking

    def jobs(
        self, ids: Iterable[str], timeout: float = 9, settled: Collection[str] = (), others: Collection[str] = ()
    ) -> dict[str, SlurmJob]:
        """Return what is known of each Job: from squeue; of those that it does not list, from sacct.

        Two calls, for any number of Jobs; scontrol is only asked about a single one, and where squeue cannot be. Of
        `settled` ones, which have left word of how they ended, it is enough that squeue has forgotten them.
        `others` are other users' Jobs: where they are not listed, a site's PrivateData may hide them.
        """
        ids = list(dict.fromkeys(ids))
        if not ids:
            return {}
        until, answered = time.monotonic() + timeout, True
        found: dict[str, SlurmJob] = {}
        why = "neither squeue nor sacct knows it any more"
        try:
            found = by_id(self._squeue(["-a", "-j", ",".join(ids)], timeout * 0.6), ids)
        except SlurmError as error:
            answered, why = False, f"{error.words[0]} does not answer: {error.answer.splitlines()[0]}"
        missing = [job_id for job_id in ids if job_id not in found and job_id not in settled]
        for look in (self._sacct, *([] if answered or len(missing) > 1 else [self._scontrol])) if missing else ():
            with suppress(SlurmError):
                told = by_id(look(missing, max(0.5, until - time.monotonic())), missing)
                # The database keeps as running what a controller lost; squeue, where it answers, knows all that live.
                found |= {job_id: job for job_id, job in told.items() if job.ended or not answered}
                break
        return {job_id: found.get(job_id) or unknown(job_id, why, answered and job_id not in others) for job_id in ids}

    def of_run(self, run_id: str, users: Collection[str] = ()) -> list[SlurmJob]:
        """Return the Jobs that bear a Run's mark: a comment `pipeline:ID:…`, or a name `…-ID`; arrays as one.

        Of these `users` alone, so that a large cluster's queue is not read whole; of none: of any user.
        """
        which = ["-a", "-u", ",".join(sorted(users))] if users else ["-a"]
        comment, name = f"pipeline:{run_id}:", f"-{run_id}"
        rows = [
            (whole, job)
            for whole, job in self._squeue(which)
            if (job.comment.startswith(comment) if self.mark == "comment" else job.name.endswith(name))
        ]
        return list(by_id(rows, dict.fromkeys(whole for whole, _ in rows)).values())

    def recall(self, ids: Sequence[str], timeout: float = 4) -> dict[str, SlurmJob]:
        """Return how Jobs ended that squeue no longer names, as far as accounting knows it and answers."""
        with suppress(SlurmError):
            told = by_id(self._sacct(ids, timeout), ids) if ids else {}
            return {job_id: job for job_id, job in told.items() if job.ended}  # it keeps as running what was lost
        return {}

    def _sacct(self, ids: Sequence[str], timeout: float) -> list[tuple[str, SlurmJob]]:
        words = ["sacct", "-n", "-X", "-P", f"--delimiter={CELL}", "-j", ",".join(ids), "-o", SACCT_COLUMNS]
        return from_sacct(self.run(words, timeout))

    def _scontrol(self, ids: Sequence[str], timeout: float) -> list[tuple[str, SlurmJob]]:
        return from_scontrol(self.run(["scontrol", "-o", "show", "job", *ids], timeout))

    def _squeue(self, which: Sequence[str], timeout: float | None = None) -> list[tuple[str, SlurmJob]]:
        """List Jobs; SlurmError where squeue does not answer, or says what is no such list."""
        words = ["squeue", *which, "--states=all", "-O", COLUMNS]
        answer = self.ask(words, timeout)
        if answer.code == 0:
            try:
                return from_squeue(answer.output)
            except ValueError as error:
                raise SlurmError(words, f"{error}: {said_by(answer)[:200]}") from None
        if "Invalid job id" in answer.talk:  # what it says where it knows none of them
            return []
        raise SlurmError(words, said_by(answer))

    def excluded(self, ids: Sequence[str], timeout: float = 3) -> dict[str, str]:
        """Return the nodes that each of these Jobs is kept off, as Slurm writes them; those with none are left out."""
        lines = self.run(["squeue", "-h", "-a", "-j", ",".join(ids), "-o", "%F|%x"], timeout).splitlines()
        cells = (line.strip().partition("|") for line in lines)
        return {job_id: nodes for job_id, _, nodes in cells if nodes and nodes != "(null)"}

    def priorities(self, ids: Sequence[str], timeout: float = 3) -> dict[str, Priority]:
        """Return what makes up the priority of Jobs that wait; empty where priorities have no parts."""
        words = ["sprio", "-h", "-j", ",".join(ids), "-o", SPRIO_COLUMNS]
        return from_sprio(self.run(words, timeout)) if ids else {}

    def fair_share(self, timeout: float = 3) -> dict[str, float]:
        """Return this user's fair-share factor, 0 to 1, in each account; empty where none is kept."""
        return from_sshare(self.run(["sshare", "-h", "-P", "-U", "-o", SSHARE_COLUMNS], timeout))

    def hostnames(self, node_list: str) -> list[str]:
        """Write out a list of nodes as Slurm does; UserError for a broken one (of which scontrol makes something)."""
        names = expand_node_list(node_list)
        try:
            return self.run(["scontrol", "show", "hostnames", node_list]).split() or names
        except SlurmError:
            return names

    def ping(self, timeout: float = 3) -> bool:
        """Tell whether a controller answers."""
        try:
            return " is UP" in self.run(["scontrol", "ping"], timeout)
        except SlurmError:
            return False

    def partitions(self, *, hidden: bool = False, timeout: float | None = None) -> list[Partition]:
        """List partitions, once for each kind of node in them; also those that are hidden from this user, if asked."""
        found = []
        words = ["sinfo", "-h", *(["-a"] if hidden else []), "-o", "%P|%a|%l|%D|%c|%m|%G"]
        for line in self.run(words, timeout).splitlines():
            cells = [cell.strip() for cell in line.split("|")]
            if len(cells) == 7:
                name, up, limit, nodes, cpus, memory, gres = cells
                is_default = name.endswith("*")
                counts = (_number(nodes), _number(cpus), _number(memory))
                kinds = "" if gres == "(null)" else gres
                found.append(Partition(name.rstrip("*"), is_default, up == "up", limit, *counts, kinds))
        return found

    def config(self) -> dict[str, str]:
        """Return what `scontrol show config` says: `MaxArraySize`: `1001`."""
        pairs = (line.partition("=") for line in self.run(["scontrol", "show", "config"]).splitlines())
        return {key.strip(): value.strip() for key, equals, value in pairs if equals and key.strip()}

    def version(self, name: str) -> str:
        """Return what a command says its version is."""
        return self.run([name, "--version"], 10).strip()

    def partition(self, name: str) -> dict[str, str]:
        """Return the settings of a partition: `GraceTime`: `0`."""
        return fields_of(self.run(["scontrol", "-o", "show", "partition", name]).strip())

    def accounts(self, timeout: float | None = None) -> list[str]:
        """List this user's accounts; SlurmError where there is no accounting to ask."""
        user = self.run(["id", "-un"], timeout).strip()
        words = ["sacctmgr", "-n", "-P", "show", "associations", f"user={user}", "format=Account"]
        return list(dict.fromkeys(self.run(words, timeout).split()))

    def srun_knows(self, option: str) -> bool:
        """Tell whether srun has an option: those of plugins are only there where the plugin is loaded."""
        return f"--{option}" in self.run(["srun", "--help"], 10)

    def registered(self, node_list: str) -> str:
        """Return what sinfo says of nodes, for preflight to compare with what is there; see slurm/gres.py."""
        return self.run(["sinfo", "-n", node_list, "-o", "%20N %10c %10m %25f %G"], 10)

    def schedule(self) -> tuple[str, str, str]:
        """Return what sinfo, squeue (pending) and `scontrol show reservation` print; nothing where one fails."""
        texts = []
        for words in (
            ["sinfo", "-h", "-N", "-O", NODE_COLUMNS],
            ["squeue", "-h", "-a", "--states=PENDING", "-O", PLANNED_COLUMNS],  # --start would not heed -O
            ["scontrol", "-o", "show", "reservation"],
        ):
            try:
                texts.append(self.run(words))
            except SlurmError:
                texts.append("")
        return texts[0], texts[1], texts[2]

    # Changing

    def cancel(self, ids: Iterable[str]) -> None:
        """Cancel Jobs; those that have ended are no failure."""
        ids = list(ids)
        if ids:
            answer = self.ask(["scancel", *ids])
            if answer.code != 0 and not re.search(r"Invalid job id|already (completing|completed)", answer.talk):
                raise SlurmError(["scancel", *ids], said_by(answer))

    def requeue(self, job_id: str) -> None:
        """Put a Job back into the queue, also one of --no-requeue; its script starts again from the top."""
        self.update(job_id, Requeue="1")
        self.run(["scontrol", "requeue", job_id])

    def update(self, job_id: str, **fields: str) -> None:
        """Change a Job by `scontrol update`: `update("7", Dependency="afterok:6")`."""
        self.run(["scontrol", "update", f"JobId={job_id}", *(f"{name}={value}" for name, value in fields.items())])


def _number(text: str) -> int:
    digits = re.match(r"[0-9]+", text)
    return int(digits[0]) if digits else 0


def _job_id(answer: Answer) -> str | None:
    """Return the id from sbatch's answer: one whole line `ID` or `ID;CLUSTER`, whatever else was printed."""
    if answer.code != 0:
        return None
    ids = [match[1] for line in answer.output.splitlines() if (match := JOB_ID.fullmatch(line.strip()))]
    return ids[0] if len(ids) == 1 else None
