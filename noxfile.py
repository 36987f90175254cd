"""The sessions: each calls one verb of `python -m pipeline`, or one tool, in the project's one environment."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
ENVIRONMENT = ROOT / ".nox" / "pipeline"
PYTHON = ENVIRONMENT / "bin" / "python"
EXTRAS = "train,report,test,lint"
LOCK = ROOT / "requirements.lock.txt"  # versions and hashes of all that these need, but torch
LOCKED_PYTHONS = ((3, 11), (3, 12), (3, 13))  # for which all of it has wheels
STOP_SECONDS = 180  # a stop saves a checkpoint first

nox.options.sessions = ["lint", "tests"]


def install(session: nox.Session) -> None:
    """Make the environment, unless this one was made from the same pyproject.toml.

    One for all sessions, because torch is large; made here and not by nox, which gives every session one of its own
    and would remove the interpreter under a Run that it started. By pip, whatever nox's backend is: uv and pip do not
    agree on which build `torch==2.13.0` is. By the lock, with hashes; torch is held to its version alone, because each
    index has a build of its own of it. A site whose index lacks these versions sets PIPELINE_UNLOCKED=1.
    """
    stamp = ENVIRONMENT / "installed"
    locked = sys.version_info[:2] in LOCKED_PYTHONS and not os.environ.get("PIPELINE_UNLOCKED")
    content = (ROOT / "pyproject.toml").read_bytes() + (LOCK.read_bytes() if locked else b"")
    wanted = hashlib.sha256(content).hexdigest()
    if PYTHON.is_file() and stamp.is_file() and stamp.read_text() == wanted:
        return
    if not PYTHON.is_file():
        session.run(sys.executable, "-m", "virtualenv", "--quiet", "--clear", str(ENVIRONMENT), external=True)
    session.log(f"installing into {ENVIRONMENT.relative_to(ROOT)}; the first time this takes a few minutes")
    if locked:
        run(session, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "-r", str(LOCK))
    # The build backend is in the lock: without isolation it is not fetched again, which would be without its hash.
    own = ["--no-build-isolation"] if locked else []
    run(session, "-m", "pip", "install", "--quiet", *own, "-e", f"{ROOT}[{EXTRAS}]")
    stamp.write_text(wanted)


def run(session: nox.Session, *words: str) -> None:
    """Run the environment's Python, with its tools first on PATH."""
    path = os.pathsep.join([str(PYTHON.parent), os.environ.get("PATH", os.defpath)])
    session.run(
        str(PYTHON), *words, external=True, env={"PATH": path},
        interrupt_timeout=STOP_SECONDS, terminate_timeout=STOP_SECONDS,
    )  # fmt: skip


def pipeline(session: nox.Session, *words: str) -> None:
    """Run one verb in the folder that nox was called from, so that relative paths mean what they say there."""
    install(session)
    session.chdir(session.invoked_from)
    # -P: a folder named `pipeline` there must not be imported in place of ours.
    run(session, "-P", "-m", "pipeline", *words)


@nox.session(python=False)
def pretrain(session: nox.Session) -> None:
    """Run the whole chain: [CONFIG] [key.path=value ...] [--cluster local] [--dry-run]."""
    pipeline(session, "submit", *session.posargs)


@nox.session(python=False)
def preflight(session: nox.Session) -> None:
    """Look at the nodes, their network and the Run's folder: [CONFIG or RUN] [key.path=value ...]."""
    pipeline(session, "submit", "--only", "preflight", *session.posargs)


@nox.session(python=False)
def tokenize(session: nox.Session) -> None:
    """Run tokenize alone: [CONFIG or RUN] [key.path=value ...]."""
    pipeline(session, "submit", "--only", "tokenize", *session.posargs)


@nox.session(python=False)
def evaluate(session: nox.Session) -> None:
    """Run evaluate alone: [CONFIG or RUN] [key.path=value ...]."""
    pipeline(session, "submit", "--only", "evaluate", *session.posargs)


@nox.session(python=False)
def inference(session: nox.Session) -> None:
    """Run inference alone: [CONFIG or RUN] [key.path=value ...]."""
    pipeline(session, "submit", "--only", "inference", *session.posargs)


@nox.session(python=False)
def image(session: nox.Session) -> None:
    """Build the image that stages run in: [--target cpu|gpu] [--builder NAME] [--output FOLDER]."""
    pipeline(session, "image", *session.posargs)


@nox.session(python=False)
def tests(session: nox.Session) -> None:
    """Run the tests: [pytest's options]."""
    install(session)
    run(session, "-m", "pytest", *session.posargs)


@nox.session(python=False)
def smoke(session: nox.Session) -> None:
    """Run the tests on a private Slurm of this machine, its packages installed when root: [pytest's options]."""
    install(session)
    run(session, "tests/slurm/slurm_packages.py")
    # Two Slurms at a time, each with the tests of one file: most of the time is waiting.
    run(session, "-m", "pytest", "tests/slurm", "-n", "2", "--dist", "loadfile", "-vv", *session.posargs)


@nox.session(python=False)
def lint(session: nox.Session) -> None:
    """Check style, types, shell scripts and the Dockerfile."""
    install(session)
    run(session, "-m", "ruff", "check", ".")
    run(session, "-m", "ruff", "format", "--check", ".")
    run(session, "-m", "mypy")
    session.run(str(PYTHON.with_name("shellcheck")), "-x", *SHELL_SCRIPTS, external=True)
    session.run(str(PYTHON.with_name("hadolint")), "containers/Dockerfile", external=True)


SHELL_FILES = [*sorted(ROOT.glob("sbatch/*")), *sorted(ROOT.glob("containers/*.sh")), ROOT / ".ci" / "run"]
SHELL_SCRIPTS = [str(path.relative_to(ROOT)) for path in SHELL_FILES]


@nox.session(python=False)
def faults(session: nox.Session) -> None:
    """Run the long scenarios and print one table: [--only saves|ranks|chain|chain50|soak] [--kills N] ..."""
    install(session)
    run(session, "tests/faults/all.py", *session.posargs)


@nox.session(python=False)
def bench(session: nox.Session) -> None:
    """Measure against peers, by a script of benchmarks/: NAME [its options]."""
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    if not session.posargs or session.posargs[0] not in names:
        session.error(f"write: nox -s bench -- NAME, one of {', '.join(names)}")
    install(session)
    run(session, f"benchmarks/{session.posargs[0]}.py", *session.posargs[1:])
