"""Runs elsewhere: verbs are passed on, through the prefix of `login`, to where the Run's folder and Slurm are.

What plans and submits over there is a copy of this very code, unpacked for the one call; what shows and stops is the
snapshot that the Run itself holds. So a Run that is submitted from a laptop is made like one that is submitted on the
cluster, by processes beside the files and beside Slurm; a connection that is lost in the middle leaves what a killed
submit leaves, and the same command goes on from there. The folder here only says where the Run is.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cluster.caller import Caller
from pipeline.cluster.parts import Login
from pipeline.cluster.schema import Cluster
from pipeline.config.load import dump_config, load_run_config
from pipeline.config.schema import Config
from pipeline.config.yaml12_dump import dump
from pipeline.errors import EXIT_DONE, NotReadyError, UserError
from pipeline.files import atomic_path, write_text
from pipeline.hints import python_word, shown
from pipeline.run.folder import Run
from pipeline.slurm.commands import Slurm
from pipeline.slurm.environment import clean_environment
from pipeline.submit.run_folder import PARCEL, PROJECT, code_files, describe_code, read_cluster

if TYPE_CHECKING:
    import tarfile

NO_COMMAND, NO_CONNECTION = 127, 255  # of sh, of ssh
NEEDED = "pydantic, rich, typer, yaml"  # modules that the verbs import

# All of a submission in one call: unpack what comes by standard input, and run the words in it. $1 is a file of the Run
# that is removed first (a person's stop, for `resume`), or nothing; $2 the interpreter.
UNPACK_AND_RUN = f"""
undo=$1 python=$2
shift 2
if ! said=$("$python" -c "import {NEEDED}" 2>&1 </dev/null); then
    printf 'error: host_python %s, over there: %s\\n' "$python" "${{said##*
}}" >&2
    printf 'Make an environment there, pip install pydantic pyyaml rich typer, and name its python.\\n' >&2
    exit 3
fi
trap 'exit 129' HUP INT TERM
folder=$(mktemp -d) || exit 4
trap 'rm -rf -- "$folder"' EXIT
tar -xf - -C "$folder" || exit 4
cd -- "$folder" || exit 4
if test -n "$undo"; then rm -f -- "$undo" || exit 4; fi
PYTHONPATH=$folder "$python" -m pipeline "$@" </dev/null
"""
# One verb, by the Run's own code.
VERB = """
run=$1 python=$2 verb=$3
shift 3
if ! test -f "$run/config.yaml"; then
    printf 'error: %s: no Run over there (yet); submit it from its config\\n' "$run" >&2
    exit 3
fi
export PYTHONPATH="$run/snapshot"
"""
PASS_ON = VERB + 'exec "$python" -m pipeline "$verb" "$run" "$@"'
# What the verb prints goes to where a person looks, and the file to where we read.
REPORT = VERB + '"$python" -m pipeline "$verb" "$run" >&2 && cat -- "$run/report.html"'


@dataclass(frozen=True)
class There:
    """The other end of a Run: `here` is the folder on this machine that points to it."""

    here: Run
    cluster: Cluster
    login: Login

    @property
    def run(self) -> Run:
        """The Run itself, with its paths over there."""
        return Run(Path(self.login.root) / self.name)

    @property
    def name(self) -> str:
        """The Run's name over there, which stays when the folder here is renamed or copied."""
        return load_run_config(self.here.config).name if self.here.config.is_file() else self.here.name

    @property
    def slurm(self) -> Slurm:
        return self.cluster.slurm()

    def verb(self, *words: str, given: bytes | None = None) -> int:
        """Run `python -m pipeline VERB RUN …` over there by the Run's own code; return its exit code.

        Its standard input is `given`, or stays open as long as this process lives: that is how `logs -f` learns that
        nobody reads.
        """
        verb, *rest = [word for word in words if word]
        lively = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        colour = "FORCE_COLOR=1" if lively else "NO_COLOR=1"
        return self._call(["env", *self._environment(), colour, *self._verb(PASS_ON, verb), *rest], given=given)

    def submit(self, config: Config, *words: str, undo: Path | None = None) -> int:
        """Bring code, config and cluster over there, run `python -m pipeline WORDS` on them, return its exit code."""
        flags = ["--cluster", "cluster.yaml", *filter(None, words[1:])]
        script = ["sh", "-c", UNPACK_AND_RUN, "sh", str(undo or ""), self.cluster.host_python]
        call = ["env", *self._environment(), *script, words[0], ".", *flags]
        return self._call(call, given=self._parcel(config))

    def keep_pointer(self, config: Config) -> None:
        """Write down here where the Run is; config.yaml, which makes the folder a Run, comes last."""
        try:
            name = self.name
            write_text(self.here.cluster, dump(self.cluster.model_dump()))
            write_text(self.here.config, dump_config(config.model_copy(update={"name": name})))
        except OSError as error:
            raise UserError(f"{self.here.root}: cannot write there: {error.strerror or error}") from error

    def fetch_config(self) -> None:
        """Bring the Run's config here, as it is by now: it may have been changed from another machine."""
        answer = self.slurm.ask(["cat", "--", str(self.run.config)])
        if answer.code == 1:  # cat's own, not the connection's
            raise NotReadyError(
                f"{self.run.root}: no Run over there ({answer.talk.strip()}). If it was moved there, move it back; "
                "if it was never made, submit it from its config"
            )
        if answer.code != 0:
            return  # whoever calls next over there says what is wrong
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "config.yaml"
            copy.write_text(answer.output, encoding="utf-8")
            config = load_run_config(copy)
        write_text(self.here.config, dump_config(config.model_copy(update={"runs_dir": str(self.here.root.parent)})))

    def report(self) -> Path:
        """Have the report written over there, and bring it here."""
        words = self._verb(REPORT, "report")
        with atomic_path(self.here.report) as temporary, temporary.open("wb") as file:
            code = self._call(["env", *self._environment(), *words], output=file)
            if code != EXIT_DONE:
                raise NotReadyError(f"{self.run.root}: the report could not be written over there (exit code {code})")
        return self.here.report

    def shell(self, limit: str) -> None:
        """Become a shell on a node. Does not return."""
        words = ["env", *self._environment(), *self._verb(PASS_ON, "shell"), f"--time={limit}"]
        command = Slurm(tuple(_with_terminal(self.login.prefix)), self.login.quoting).command(words)
        try:
            os.execvpe(command[0], command, clean_environment())
        except FileNotFoundError:
            raise self._no_prefix(command[0]) from None

    def _verb(self, script: str, verb: str) -> list[str]:
        return ["sh", "-c", script, "sh", str(self.run.root), self.cluster.host_python, verb]

    def _call(self, words: list[str], given: bytes | None = None, output: io.BufferedWriter | None = None) -> int:
        """Run words over there; what they say goes where this process's own words go."""
        command = self.slurm.command(words)
        sys.stdout.flush()
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, env=clean_environment())
        except FileNotFoundError:
            raise self._no_prefix(command[0]) from None
        with process:
            if given is not None:
                process.communicate(given)
            code = process.wait()
        if code in (NO_COMMAND, NO_CONNECTION):
            prefix = shlex.join(self.login.prefix)
            what = "no connection" if code == NO_CONNECTION else f"{self.cluster.host_python} was not found over there"
            raise NotReadyError(
                f"{prefix}: {what} (exit code {code}, see above). The Run is not harmed: mend login.prefix or "
                "host_python in the cluster file, or wait until the cluster answers, and give the same command again"
            )
        return code

    def _no_prefix(self, word: str) -> UserError:
        return UserError(f"{word}: no such command here; mend login.prefix in the cluster file")

    def _environment(self) -> list[str]:
        """Return assignments: how wide this terminal is, and what the Run is called here."""
        columns = os.environ.get("COLUMNS") or str(shutil.get_terminal_size((120, 40)).columns)
        caller = Caller(python_word(), shown(self.here.root), str(self.run.root))
        return [f"COLUMNS={columns}", "PYTHONUTF8=1", "PYTHONUNBUFFERED=1", "PYTHONDONTWRITEBYTECODE=1",
                caller.variable()]  # fmt: skip

    def _parcel(self, config: Config) -> bytes:
        """Pack this code, and config and cluster as they are over there: no login any more, and its folder of Runs."""
        texts = {
            "config.yaml": dump_config(config.model_copy(update={"runs_dir": self.login.root, "name": self.name})),
            "cluster.yaml": dump(self.cluster.model_copy(update={"login": None}).model_dump()),
            PARCEL: json.dumps(describe_code()),  # there is no git repository in what is packed
        }
        import tarfile  # which only who sends something needs

        parcel = io.BytesIO()
        with tarfile.open(fileobj=parcel, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for path in code_files(PROJECT):
                tar.add(path, path.relative_to(PROJECT), filter=_anonymous)
            for name, text in texts.items():
                entry, content = tarfile.TarInfo(name), text.encode()
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        return parcel.getvalue()


def there_of(run: Run, cluster: Cluster | None = None) -> There | None:
    """Return the other end of a Run: of one that is pointed to here, or of one for `cluster`; None where it is here."""
    if cluster is None:
        if not run.cluster.is_file():
            return None
        cluster = read_cluster(run)
    if cluster.login is None:
        return None
    _check_pointer(run, cluster.login)
    return There(run, cluster, cluster.login)


def pass_on(path: Path, *words: str, given: bytes | None = None) -> int | None:
    """Run a verb where the Run at `path` is, if that is elsewhere; return its exit code, None if the Run is here."""
    there = there_of(Run.open(path))
    return there.verb(*words, given=given) if there else None


def _check_pointer(run: Run, login: Login) -> None:
    """Refuse a folder here that is something else than this very Run's pointer."""
    old = read_cluster(run).login if run.cluster.is_file() else None
    if run.config.is_file() and (old is None or old.root != login.root):
        where = f"in {old.root}" if old else "on this machine"
        raise UserError(f"{run.root}: a Run of this name is {where}; take another name, for example: name={run.name}-2")
    if not run.config.is_file() and run.root.is_dir() and any(entry != run.cluster for entry in run.root.iterdir()):
        raise UserError(f"{run.root}: the folder holds something that is not a Run; take another name: name=...")


def _with_terminal(prefix: list[str]) -> list[str]:
    """Ask ssh, or kubectl, for a terminal over there; other verbs have none, for it would change what they say."""
    asked: list[str] = []
    for place, word in enumerate(prefix):
        is_program = place == 0 or word == "ssh"  # the second of `ssh gate ssh login01`
        ours = Path(word).name == "ssh" if is_program else word == "exec" and Path(prefix[0]).name == "kubectl"
        asked += [word, "-t"] if ours else [word]
    return asked


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out who owns a file here: over there it is another user, and root would give it away."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
