"""What a Job's priority in the queue is made of, read from sprio and sshare."""

from __future__ import annotations

from dataclasses import dataclass

SPRIO_COLUMNS = "%i|%Y|%A|%F|%J|%P|%Q"
SSHARE_COLUMNS = "Account,User,FairShare"
PARTS = ("waiting", "fair share", "size", "partition", "QOS")


@dataclass(frozen=True)
class Priority:
    """A Job's priority, and how much each of PARTS adds to it."""

    total: int
    parts: dict[str, int]

    def words(self) -> str:
        """Say what it is made of: `4,021: 2,000 for waiting, 1,500 for fair share`."""
        told = ", ".join(f"{value:,} for {name}" for name, value in self.parts.items() if value)
        return f"{self.total:,}" + (f": {told}" if told else "")


def from_sprio(text: str) -> dict[str, Priority]:
    """Read sprio's lines of SPRIO_COLUMNS, by id."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == len(PARTS) + 2 and all(cell.isdecimal() for cell in cells[1:]):
            total, *parts = map(int, cells[1:])
            found[cells[0].partition("_")[0]] = Priority(total, dict(zip(PARTS, parts, strict=True)))
    return found


def from_sshare(text: str) -> dict[str, float]:
    """Read sshare's lines of SSHARE_COLUMNS (-h -P): those of users, by account."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 3 and cells[1]:
            try:
                found[cells[0]] = float(cells[2])
            except ValueError:
                continue
    return found
