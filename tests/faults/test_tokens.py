"""tokenize under kills at random moments, and of more text than it may have memory for."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from micro import environment

from pipeline.config.schema import Config
from pipeline.files import read_json, sha256_file
from pipeline.run.folder import Run

TEXT_BYTES = int(os.environ.get("FAULTS_TEXT_BYTES", 2_000_000_000))
MEMORY = 1_500_000_000  # bytes of address space of each process
KILLS = 12

PROGRAM = """
import resource, sys
from pathlib import Path
from pipeline.config.schema import Config
from pipeline.lm import pieces
from pipeline.run.folder import Run
from pipeline.stages.tokenize import tokenize
pieces.SMALLEST = int(sys.argv[3])
tokenize(Run(Path(sys.argv[1])), Config.model_validate_json(sys.argv[2]), sys.argv[4])
print("peak", max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) * 1024)
"""


def write_text(path: Path, size: int, seed: int = 0) -> None:
    """Write JSON lines of `size` bytes in all: documents of words, some long, one in fifty a duplicate."""
    generator = random.Random(seed)
    words = ["".join(generator.choices("etaoinshrdlu", k=generator.randrange(2, 9))) for _ in range(20_000)]
    blocks = [" ".join(generator.choices(words, k=100)) for _ in range(3000)]
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            for _ in range(1000):
                length = 2000 if generator.random() < 1e-4 else generator.randrange(1, 12)
                text = "\n".join(generator.choices(blocks, k=length))
                file.write((json.dumps({"text": text}) + "\n") * (2 if generator.random() < 0.02 else 1))


def config(path: Path, **section: object) -> Config:
    keys = {"vocab_size": 1000, "validation_fraction": 0.05, "training_bytes": 1_000_000, "processes": 2}
    return Config.model_validate({"name": "x", "data": str(path), "tokenize": keys | section})


def start(run: Run, wanted: Config, smallest: int, memory: int | None = None, phase: str = "") -> subprocess.Popen[str]:
    def limit() -> None:
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(run.root), wanted.model_dump_json(), str(smallest), phase],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), preexec_fn=limit,
        start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], seconds: float) -> str:
    """Return what it printed; an error where it failed."""
    out, talk = process.communicate(timeout=seconds)
    assert process.returncode == 0, talk[-3000:]
    return out


def hashes(run: Run) -> dict[str, str]:
    found = [path for pattern in ("*.bin", "*.model", "index.json") for path in run.data.glob(pattern)]
    return {path.name: sha256_file(path) for path in found}


def children_of(pid: int) -> list[int]:
    with suppress(OSError):
        return [
            int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
        ]
    return []


def test_processes_and_whole_attempts_are_killed_and_the_bytes_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    write_text(path, 12_000_000)
    wanted = config(path, shard_tokens=500_000)
    whole, killed = Run(tmp_path / "whole"), Run(tmp_path / "killed")
    began = time.monotonic()
    finish(start(whole, wanted, 300_000), 600)
    seconds = time.monotonic() - began
    generator = random.Random(1)
    for number in range(KILLS):
        process = start(killed, wanted, 300_000)
        time.sleep(generator.uniform(0.2, 1.0) * seconds)
        victims = children_of(process.pid) if number % 2 else []  # every second time one of its processes
        with suppress(ProcessLookupError):
            os.kill(generator.choice(victims or [process.pid]), signal.SIGKILL)
        process.communicate(timeout=600)
    finish(start(killed, wanted, 300_000), 600)
    assert hashes(killed) == hashes(whole)
    assert not list(killed.data.glob(".*"))


def finished(run: Run) -> dict[str, tuple[int, int]]:
    """Return inode and mtime of the shards that are recorded as finished; the records may vanish meanwhile."""
    with suppress(FileNotFoundError):
        return files(run, [f"{path.stem}.bin" for path in (run.data / "pieces").glob("*-*.json")])
    return {}


def files(run: Run, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    return {name: ((run.data / name).stat().st_ino, (run.data / name).stat().st_mtime_ns) for name in names}


def test_the_index_phase_is_killed_again_and_again_and_no_finished_shard_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    write_text(path, 12_000_000)
    wanted = config(path, shard_tokens=50_000)
    killed = Run(tmp_path / "killed")
    for phase in ("tokenizer", "encode"):
        finish(start(killed, wanted, 300_000, phase=phase), 600)
    whole = Run(shutil.copytree(killed.root, tmp_path / "whole"))
    finish(start(whole, wanted, 300_000, phase="index"), 600)
    generator = random.Random(2)
    there: dict[str, tuple[int, int]] = {}
    kills = 0
    while not killed.index.is_file():
        process = start(killed, wanted, 300_000, phase="index")
        more = generator.randrange(1, 8)
        while process.poll() is None and len(finished(killed)) < len(there) + more:
            time.sleep(0.001)
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=600)
        kills += process.returncode == -signal.SIGKILL
        if killed.index.is_file():
            break
        now = finished(killed)
        assert len(now) > len(there)
        assert there.items() <= now.items()
        there = now
    finish(start(killed, wanted, 300_000, phase="index"), 600)
    print(f"{kills} kills, {len(hashes(whole))} files")
    assert kills > 5
    assert hashes(killed) == hashes(whole)
    assert files(killed, there) == there
    assert not list(killed.data.glob(".*"))


def test_more_text_than_memory(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    write_text(path, TEXT_BYTES)
    run = Run(tmp_path / "run")
    printed = finish(start(run, config(path), 2 << 20, MEMORY), 3600)
    index = read_json(run.index)
    assert index["splits"]["train"]["bytes"] > 0.9 * TEXT_BYTES
    assert index["splits"]["train"]["duplicates"] > 0
    peak = int(printed.split("peak ")[1])
    print(f"peak of one process: {peak / 1e6:.0f} MB for {path.stat().st_size / 1e6:.0f} MB of text")
    assert peak < MEMORY
