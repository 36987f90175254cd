# ruff: noqa: E402
"""Compare ways to compress the image: what each costs to build, its size, and how fast it is unpacked and started.

`nox -s bench -- image --image FILE.sqsh [--rounds N] [--only NAME ...]`, as root. The file is unpacked once and
written anew with each set of options. A start is measured from outside: loop mount, overlay, chroot, Python, import;
its file is dropped from the cache of pages first, as it is on a node that has not used it yet. Rounds are interleaved.
The least wall time is told, and the median of the CPU time, which others on the machine disturb less. Ends with a table
for docs/containers.md and one JSON line per figure: the options that images are built with against the best others in
that figure alone; a ratio above 1 is in our favour.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from pipeline.image.squash import SQUASH

OPTIONS = {
    "lzo -noD (Enroot's default)": "-comp lzo -noD",
    "gzip 1": "-comp gzip -Xcompression-level 1",
    "lz4": "-comp lz4",
    "zstd 1": "-comp zstd -Xcompression-level 1",
    "zstd 1, 256K": "-comp zstd -Xcompression-level 1 -b 256K",
    "zstd 3": "-comp zstd -Xcompression-level 3",
    "zstd 3, 256K": "-comp zstd -Xcompression-level 3 -b 256K",
    "zstd 3, 1M": "-comp zstd -Xcompression-level 3 -b 1M",
    "zstd 3 -noD": "-comp zstd -Xcompression-level 3 -noD",
    "zstd 9": "-comp zstd -Xcompression-level 9",
}
FIGURES = {"size": "bytes", "unpack_cpu": "CPU s", "mount": "s", "import": "s", "import_cpu": "CPU s"}  # less is better
ONCE = {"size", "unpack_cpu"}
IMPORT = ["python3", "-c", "import torch"]


def cpu() -> float:
    """Return the CPU seconds, user's and kernel's, of the commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(words: list[str]) -> tuple[float, float]:
    """Run a command that must succeed; return its seconds of wall time and of CPU time."""
    started, before = time.perf_counter(), cpu()
    subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started, cpu() - before


def drop(image: Path) -> None:
    """Take a file out of the cache of pages, and nobody else's."""
    with image.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start(image: Path, work: Path, *program: str) -> tuple[float, float]:
    """Start a program in the image as on a node that has not used it yet; return wall and CPU seconds."""
    drop(image)
    script = PROJECT / "containers" / "smoke.sh"
    return timed(["unshare", "--mount", "bash", str(script), str(image), str(PROJECT), str(work), *program])


def unpack(image: Path) -> float:
    """Unpack an image into memory, as Enroot does to a disk where it cannot mount; return the CPU seconds."""
    with tempfile.TemporaryDirectory(prefix="image-bench.", dir="/dev/shm") as folder:
        return timed(["unsquashfs", "-quiet", "-no-progress", "-dest", f"{folder}/root", str(image)])[1]


def table(results: dict[str, dict[str, float]]) -> str:
    """Write the results as a table of Markdown."""
    columns = ["options", "build CPU s", "size MB", "unpack CPU s", "mount s", "to `import torch` s", "CPU s of it"]
    lines = [f"| {' | '.join(columns)} |", "|---" + "|---:" * 6 + "|"]
    for name, found in results.items():
        starts = f"{found['mount']:.2f} | {found['import']:.2f} | {found['import_cpu']:.2f}"
        costs = f"{found['build_cpu']:.1f} | {found['size'] / 1e6:.0f} | {found['unpack_cpu']:.1f}"
        lines.append(f"| {name} | {costs} | {starts} |")
    return "\n".join(lines)


def figures(results: dict[str, dict[str, float]], runs: int) -> list[dict[str, object]]:
    """Compare the options that images are built with to the best of the others; none where they were not measured."""
    ours = next((name for name in results if OPTIONS[name].split() == SQUASH), None)
    others = [name for name in results if name != ours]
    found: list[dict[str, object]] = []
    for key, unit in FIGURES.items() if ours and others else ():
        best = min(others, key=lambda name: results[name][key])
        mine, theirs = results[str(ours)][key], results[best][key]
        found.append(
            {
                "benchmark": f"image, {key}", "ours": round(mine, 3), "unit": unit, "best_peer": round(theirs, 3),
                "peer": best, "ratio": round(theirs / mine, 3), "runs": 1 if key in ONCE else runs,
            }
        )  # fmt: skip
    return found


def main() -> None:
    """Measure, print the table, end with JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", type=Path, required=True, help="an image that pipeline image has built")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(OPTIONS), help="some of the sets of options, by name")
    words = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("image.py mounts images, so it must be run by root")
    with tempfile.TemporaryDirectory(prefix="image-bench.") as folder:
        root, work = Path(folder) / "root", Path(folder) / "work"
        timed(["unsquashfs", "-quiet", "-no-progress", "-dest", str(root), str(words.image)])
        files, results, starts = {}, {}, {name: {"mount": [], "import": []} for name in words.only}
        for number, name in enumerate(words.only):
            files[name] = Path(folder) / f"{number}.sqsh"
            line = ["mksquashfs", str(root), str(files[name]), "-all-root", "-noappend", "-no-progress"]
            seconds, used = timed([*line, *OPTIONS[name].split()])
            results[name] = {"build": seconds, "build_cpu": used, "size": files[name].stat().st_size}
            results[name]["unpack_cpu"] = unpack(files[name])
            print(f"{name}: built in {seconds:.1f} s", file=sys.stderr)
        for _ in range(words.rounds):
            for name, image in files.items():
                starts[name]["mount"].append(start(image, work, "true"))
                starts[name]["import"].append(start(image, work, *IMPORT))
        for name, found in starts.items():
            results[name] |= {kind: min(wall for wall, _ in times) for kind, times in found.items()}
            results[name] |= {
                f"{kind}_cpu": statistics.median(used for _, used in times) for kind, times in found.items()
            }
    print(table(results))
    for figure in figures(results, words.rounds):
        print(json.dumps(figure))


if __name__ == "__main__":
    main()
