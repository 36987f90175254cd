"""Read what has been added to a file since the last look."""

from __future__ import annotations

from pathlib import Path

CHUNK_BYTES = 1 << 20  # per look, so that a huge log never becomes one huge string


class Tail:
    """The growth of one file, in whole lines; a file that is missing, replaced or cut is no error."""

    def __init__(self, path: Path, at_end: bool = False) -> None:
        self.path = path
        self._position = _size(path) if at_end else 0
        self._partial = b""

    @property
    def grown(self) -> bool:
        """Tell whether there is something that was not read yet."""
        return _size(self.path) != self._position

    def lines(self) -> list[str]:
        """Return the lines completed since the last call, without their line ends; at most 1 MiB at once."""
        size = _size(self.path)
        if size < self._position:  # truncated by a restart
            self._position, self._partial = 0, b""
        if size == self._position:
            return []
        try:
            with self.path.open("rb") as file:
                file.seek(self._position)
                data = file.read(CHUNK_BYTES)
        except OSError:
            self._position = size  # unreadable: what is there now is given up, or `grown` would stay true
            return []
        self._position += len(data)
        *whole, self._partial = (self._partial + data).split(b"\n")
        return [line.decode("utf-8", "replace") for line in whole]

    def unfinished(self) -> list[str]:
        """Return the last line if it has no line end, once: for a file that will not grow any more."""
        partial, self._partial = self._partial, b""
        return [partial.decode("utf-8", "replace")] if partial else []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
