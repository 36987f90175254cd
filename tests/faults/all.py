"""Run all long scenarios, one after another, and print one table of what came of them: `nox -s faults`.

`nox -s faults -- [--only saves|ranks|chain|chain50|soak] [--kills N] [--minutes M] [--every S] [--seed N]`. By default the whole
takes about two hours, of which the soak is a half hour and its twin some minutes, chain50 as much. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import table

FOLDER = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=["saves", "ranks", "chain", "chain50", "soak"], default=None)
    parser.add_argument("--kills", default="10", help="of the chain")
    parser.add_argument("--minutes", default="30", help="of the soak")
    parser.add_argument("--every", default="120", help="seconds from one fault of the soak to the next, about")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--away", default="600", help="seconds that the controller of chain50 is away")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows_path, junit = Path(folder) / "rows.jsonl", Path(folder) / "junit.xml"
        parts = {
            "saves": [str(FOLDER / "kill_save.py")],
            "ranks": ["-m", "pytest", str(FOLDER), "-n", "0", f"--junitxml={junit}"],
            "chain": [str(FOLDER / "kill_chain.py"), "--kills", options.kills, "--seed", options.seed],
            "chain50": [str(FOLDER / "chain50.py"), "--seed", options.seed, "--away", options.away],
            "soak": [
                str(FOLDER / "soak.py"), "--minutes", options.minutes, "--every", options.every, "--seed", options.seed,
            ],
        }  # fmt: skip
        rows: list[dict[str, object]] = []
        for part in options.only or parts:
            rows += run_part(part, parts[part], rows_path, junit)
    print(f"\n{table.show(rows)}")
    return int(any(row["result"] == table.FAILED for row in rows))


def run_part(part: str, words: list[str], rows_path: Path, junit: Path) -> list[dict[str, object]]:
    """Run one part and return its rows; one that dies without a failed row gets one."""
    print(f"\n== {part}", flush=True)
    began = time.monotonic()
    rows_path.unlink(missing_ok=True)
    status = subprocess.run([sys.executable, *words], env=os.environ | {table.VARIABLE: str(rows_path)}).returncode
    rows = table.read(rows_path)
    if part == "ranks" and junit.exists():
        rows += table.of_pytest(junit)
    if not rows or (status != 0 and all(row["result"] != table.FAILED for row in rows)):
        detail = f"ended with status {status}"
        rows.append({"scenario": part, "result": table.FAILED, "detail": detail, "goodput": None})
    print(f"== {part}: {time.monotonic() - began:.0f} s", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
