"""One private Slurm for all tests of this folder; each finds an empty queue and idle nodes, and is bounded."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import FrameType

import pytest
import slurm_containers
import training_image
from private_slurm import PrivateSlurm, new_root
from slurm_packages import reason

LIMIT = 600  # seconds for a test; the waits in it have limits of their own and say what they waited for
TOTAL = 2700  # seconds for all; what has not begun by then fails
BEGIN = time.monotonic()
NOTES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def slurm() -> Iterator[PrivateSlurm]:
    """The private Slurm: `slurm.env` is the environment that reaches it."""
    if why := reason():
        pytest.skip(why)
    # Other job ids for each worker of xdist: the port where ranks meet is made of them, and all are on one machine.
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    settings = {"FirstJobId": str(1 + 2000 * worker)}
    containers = not slurm_containers.reason()
    with new_root() as folder, PrivateSlurm(Path(folder), containers=containers, settings=settings) as slurm:
        yield slurm


@pytest.fixture(scope="session")
def small_image(slurm: PrivateSlurm) -> Path:
    """Return an image with a shell and little else, which starts at once, and which every user may start."""
    if why := slurm_containers.reason():
        pytest.skip(why)
    return slurm_containers.build_small_image(slurm.root / "image")


@pytest.fixture
def root() -> Iterator[Path]:
    """An empty folder for a Slurm that a test starts for itself."""
    if why := reason():
        pytest.skip(why)
    with new_root() as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def bounded(request: pytest.FixtureRequest) -> Iterator[None]:
    """End a test that has run for too long, and leave nothing of it to the next one."""

    if time.monotonic() - BEGIN > TOTAL:
        pytest.fail(f"the tests on the private Slurm have run for {TOTAL} s")

    def too_long(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{request.node.name} has run for {LIMIT} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    if "slurm" in request.fixturenames:
        request.getfixturevalue("slurm").reset()


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print a sentence at the end of the tests: what was measured, and is not asserted."""
    return lambda text: request.config.stash.setdefault(NOTES, []).append(f"{request.node.name}: {text}")


@pytest.fixture(scope="session")
def image(slurm: PrivateSlurm) -> Path:
    """Return the training image, which stages run in; it is built where no earlier run of the tests has done so."""
    if why := slurm_containers.reason():
        pytest.skip(why)
    try:
        return training_image.find_or_build()
    except training_image.Unavailable as error:
        pytest.skip(str(error))


def pytest_report_header() -> str:
    """Say what starts the containers: a claim about the stand-in is not yet one about Pyxis."""
    return f"containers: {slurm_containers.runtime()}"


def pytest_configure() -> None:
    """Turn SIGTERM into what Ctrl-C does, after which the fixtures are still torn down."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the controller wrote last under a test that failed."""
    report = yield
    for value in item.funcargs.values() if report.failed else ():
        if isinstance(value, PrivateSlurm) and (log := value.root / "log" / "slurmctld.log").exists():
            report.sections.append((log.name, "\n".join(log.read_text(errors="replace").splitlines()[-30:])))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if notes := config.stash.get(NOTES, []):
        terminalreporter.section("measured")
        for text in notes:
            terminalreporter.line(text)
