"""Secrets by name: their values come from a file that only its owner may read, or from the environment that submits.

They reach the ranks by the environment alone: no plan, script, log, option or image ever holds one.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from pipeline.cluster.schema import Cluster
from pipeline.errors import NotReadyError, UserError

LINE = re.compile(r"(?:export +)?([A-Za-z_][A-Za-z0-9_]*)=")


def check_secrets(cluster: Cluster) -> None:
    """Refuse a file of secrets that others may read, and a name that has no value anywhere."""
    named = _names_in(Path(cluster.secret_file)) if cluster.secret_file else set()
    missing = [name for name in cluster.secret_env if name not in named and not os.environ.get(name)]
    if missing:
        place = f"{cluster.secret_file}, or " if cluster.secret_file else "secret_file, or "
        raise UserError(
            f"secret_env: {', '.join(missing)} has no value; write NAME=value into {place}export it before you submit"
        )


def _names_in(path: Path) -> set[str]:
    """Return the names that a file of secrets sets; its values are not looked at."""
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise NotReadyError(f"secret_file: {path}: {error.strerror or error}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise UserError(f"secret_file: {path}: others may read it; make it yours alone: chmod 600 {path}")
    return {match[1] for line in text.splitlines() if (match := LINE.match(line.strip()))}
