"""The sessions: each chooses an environment and calls one verb of `python -m pipeline`."""

from __future__ import annotations

import hashlib
from pathlib import Path

import nox

ROOT = Path(__file__).parent
nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "virtualenv"  # comes with nox; pip, not uv, so that torch's pin means one thing
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "tests"]

EXTRAS = "train,report,test,lint"
STOP_SECONDS = 180  # a stop saves a checkpoint first

session = nox.session(venv_location=ROOT / ".nox" / "pipeline")  # one environment: torch is installed once


def install(session: nox.Session) -> None:
    """Install the project, unless this environment was made from the same pyproject.toml."""
    stamp = Path(session.virtualenv.location) / "installed"
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    session.install("-e", f"{ROOT}[{EXTRAS}]")
    stamp.write_text(wanted)


def pipeline(session: nox.Session, *words: str) -> None:
    """Run one verb in the folder that nox was called from, so that relative paths mean what they say there."""
    install(session)
    session.chdir(session.invoked_from)
    # -P: a folder named `pipeline` there must not be imported in place of ours.
    session.run("python", "-P", "-m", "pipeline", *words, interrupt_timeout=STOP_SECONDS, terminate_timeout=STOP_SECONDS)


@session
def pretrain(session: nox.Session) -> None:
    """Run the whole chain: [CONFIG] [key.path=value ...] [--cluster local] [--dry-run]."""
    pipeline(session, "submit", *session.posargs)


@session
def tokenize(session: nox.Session) -> None:
    """Run tokenize alone: [CONFIG or RUN] [key.path=value ...]."""
    pipeline(session, "submit", "--only", "tokenize", *session.posargs)


@session
def evaluate(session: nox.Session) -> None:
    """Run evaluate alone: [CONFIG or RUN] [key.path=value ...]."""
    pipeline(session, "submit", "--only", "evaluate", *session.posargs)


@session
def inference(session: nox.Session) -> None:
    """Run inference alone: [CONFIG or RUN] [key.path=value ...]."""
    pipeline(session, "submit", "--only", "inference", *session.posargs)


@session
def tests(session: nox.Session) -> None:
    """Run the tests: [pytest's options]."""
    install(session)
    session.run("python", "-m", "pytest", *session.posargs)


@session
def lint(session: nox.Session) -> None:
    """Check format, types and shell scripts."""
    install(session)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("shellcheck", "-x", *map(str, [*sorted(Path("sbatch").iterdir()), Path(".ci/run")]))


@session
def faults(session: nox.Session) -> None:
    """Kill the chain at random moments and compare its results with an undisturbed twin: [--rounds N] [--seed N]."""
    install(session)
    session.run("python", "tests/faults/kill_chain.py", *session.posargs)
