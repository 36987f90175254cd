"""A file of secrets is read as it stands, by what becomes the process that needs it, and no message shows its text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import environment

from pipeline.cluster.secret_file import read_secrets
from pipeline.errors import NotReadyError, UserError


def written(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_each_character_of_a_value_is_itself(tmp_path: Path) -> None:
    lines = [
        "# of mine",
        "",
        "  A=plain ",
        "export B=$(touch${IFS}hacked)`x`\\n",
        "C='it is $HOME'\r",
        'D="a b"',
        "E=",
        "F=x#y=z;w",
    ]
    found = read_secrets(written(tmp_path / "secrets", "\n".join(lines).encode()))
    assert found == {
        "A": "plain", "B": "$(touch${IFS}hacked)`x`\\n", "C": "it is $HOME", "D": "a b", "E": "", "F": "x#y=z;w",
    }  # fmt: skip


WRONG = {
    "a blank after =": b"TOKEN= canary",
    "a blank before =": b"TOKEN =canary",
    "a comment behind": b"TOKEN=canary # mine",
    "no name": b"canary",
    "a name that is none": b"1TOKEN=canary",
    "a quote left open": b"TOKEN='canary",
    "not UTF-8": b"TOKEN=canary\xff",
    "a NUL": b"TOKEN=canary\0",
    "a command": b"touch canary",
    "twice": b"TOKEN=canary\nTOKEN=canary",
}


@pytest.mark.parametrize("line", WRONG.values(), ids=WRONG)
def test_a_line_that_is_wrong_is_told_by_its_number(tmp_path: Path, line: bytes) -> None:
    path = written(tmp_path / "secrets", b"FIRST=1\n" + line + b"\n")
    with pytest.raises(UserError) as refused:
        read_secrets(path)
    assert f"{path}:{2 + line.count(b'TOKEN=canary' + bytes([10]))}: " in str(refused.value)
    assert "canary" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_one_that_others_may_read_or_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="chmod 600"):
        read_secrets(written(tmp_path / "secrets", b"A=1\n", 0o640))
    with pytest.raises(NotReadyError, match="secret_file: .*missing: No such file"):
        read_secrets(tmp_path / "missing")


def become(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline.cluster.secret_file", str(path), *words],
        capture_output=True, text=True, env=environment(), check=False,
    )  # fmt: skip


def test_what_becomes_the_program_has_them(tmp_path: Path) -> None:
    path = written(tmp_path / "secrets", b"TOKEN=canary\n")
    assert become(path, "printenv", "TOKEN").stdout == "canary\n"
    assert become(path, "sh", "-c", "exit 7").returncode == 7
    missing = become(path, "no-such-program")
    assert (missing.returncode, missing.stderr) == (127, "error: no-such-program: No such file or directory\n")
    broken = become(written(tmp_path / "broken", b"TOKEN= canary\n"), "printenv")
    assert broken.returncode == 2
    assert broken.stderr.startswith("error: secret_file: ")
    assert "canary" not in broken.stderr + broken.stdout
