"""Files that appear whole or not at all, and lines that are never torn."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import EXIT_STORAGE, UserError

BLOCK = 16 << 20


class TornError(UserError, ValueError):
    """A record is no whole JSON. Who can do without it catches ValueError; for all others it is a message."""

    exit_code = EXIT_STORAGE


def fsync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_file(path: Path) -> None:
    """Make what was written to a file, by whatever process, survive a power loss."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def temporary_path(path: Path) -> Path:
    """Name a neighbour of `path` to write to before the rename; unique to this process."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextmanager
def atomic_path(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary neighbour that becomes `path` (fsync, rename) if the body succeeds.

    Without `durable` it may be gone after a power loss, but is never seen torn by a reader.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    try:
        yield temporary
        if durable:
            fsync_file(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write `text` as UTF-8 so that readers see the old file or the new one, never a part."""
    with atomic_path(path, durable=durable) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Write `value` as readable JSON, atomically; NaN is refused because JSON has none."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", durable=durable)


def read_json(path: Path) -> Any:
    """Read one JSON file; None where there is no such file. Raises TornError for one that is cut or not JSON."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TornError(_torn(path, f"{len(content)} bytes that are no whole JSON")) from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; empty where there is no such file. Raises TornError for anything else."""
    value = read_json(path)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TornError(_torn(path, f"a JSON {type(value).__name__} where an object belongs"))
    return value


def _torn(path: Path, what: str) -> str:
    return (
        f"{path}: holds {what}: a full disk, a power cut or a broken copy leaves such files. "
        "Put a whole copy back, or move it away to have it made anew, then call again"
    )


def append_line(path: Path, record: dict[str, Any], check: Callable[[], None] = lambda: None) -> None:
    """Append one JSON line by a single write, so that lines of two processes never mix.

    `check` may raise, for one that is no longer to write here. It is asked when the file is open: if another process
    has since put a new file in its place, the line goes into the old one, and nobody sees it.
    """
    line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        check()
        if _ends_torn(fd):  # of a killed writer: without this the new line would be lost with it
            line = b"\n" + line
        if os.write(fd, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(fd)


def _ends_torn(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines; a torn last line (a killed writer) is left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    records = []
    for line in text.split("\n"):  # not splitlines(): U+2028 and its like stand in texts of a model as they are
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def sha256_file(path: Path) -> str:
    """Hash a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_range(path: Path, start: int, end: int | None) -> str:
    """Hash the bytes of a file from `start` to before `end`."""
    if start == 0 and end is None:
        return sha256_file(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        while block := file.read(BLOCK if end is None else min(BLOCK, end - file.tell())):
            digest.update(block)
    return digest.hexdigest()


def stat_of(path: Path) -> list[int]:
    """Return what a file system shows of a file's content without reading it: size, mtime and ctime in ns, inode."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
