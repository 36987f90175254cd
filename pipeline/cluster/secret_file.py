"""A file of secrets: NAME=value lines that are read as they stand, by the process that becomes the one that needs them.

    python -m pipeline.cluster.secret_file FILE PROGRAM WORD…

No shell reads it, so nothing in it is run, and no message shows more of a line than its number.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import EXIT_USAGE, NotReadyError, UserError

LINE = re.compile(r"(?:export[ \t]+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<value>.*)")
QUOTES = ("'", '"')
NO_COMMAND = 127


def read_secrets(path: Path) -> dict[str, str]:
    """Return names and values. Blank lines and those that begin with # say nothing; one pair of quotes may stand around
    a value, and within it every character is itself.

    UserError for a file that others may read, and for a line that is none of this: by its number alone.
    """
    try:
        mode = path.stat().st_mode
        content = path.read_bytes()
    except OSError as error:
        raise NotReadyError(f"secret_file: {path}: {error.strerror or error}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise UserError(f"secret_file: {path}: others may read it; make it yours alone: chmod 600 {path}")
    found: dict[str, str] = {}
    for number, line in enumerate(content.split(b"\n"), 1):
        if not (stripped := line.strip()) or stripped.startswith(b"#"):
            continue
        try:
            name, value = _pair(stripped)
            if name in found:
                raise ValueError("this name is set above already; keep one of the two lines")
        except ValueError as problem:
            raise UserError(f"secret_file: {path}:{number}: {problem}") from None
        found[name] = value
    return found


def _pair(line: bytes) -> tuple[str, str]:
    """Return name and value of a line; ValueError with what is wrong with it, and nothing of its text."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:  # whose own message shows the bytes
        raise ValueError("not UTF-8; write it anew as plain text") from None
    match = LINE.fullmatch(text)
    if match is None or "\0" in text:
        raise ValueError("not NAME=value; write a variable's name, =, and its value, without blanks around =")
    value = match["value"]
    if value.startswith(QUOTES):
        if len(value) < 2 or value[-1] != value[0]:
            raise ValueError("a quote that does not end with the line; close it, or write the value without")
        return match["name"], value[1:-1]
    if re.search(r"\s", value):
        raise ValueError("a blank in the value, or before it; remove it, or put the value in quotes")
    return match["name"], value


def main(words: Sequence[str]) -> int:
    """Become PROGRAM, with the secrets in its environment."""
    if len(words) < 2:
        print("usage: python -m pipeline.cluster.secret_file FILE PROGRAM WORD…", file=sys.stderr)
        return EXIT_USAGE
    try:
        os.environ.update(read_secrets(Path(words[0])))
        os.execvp(words[1], list(words[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {words[1]}: {error.strerror}", file=sys.stderr)
        return NO_COMMAND


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
