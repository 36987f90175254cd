"""A clock that stands still while this process is stopped, as a suspended Job is: what was not lived does not count."""

from __future__ import annotations

import time

LONGEST = 5.0  # seconds between two ticks; a process that has to wait longer for its turn was stopped
USUAL = 0.5  # seconds that such a time counts as


class AwakeClock:
    """Seconds of life. One thread calls `tick` at short intervals; all may ask."""

    def __init__(self) -> None:
        self._mark: tuple[float, float] = (0.0, time.monotonic())  # replaced as one, so that no reader sees half
        self._ticks = False

    def tick(self) -> float:
        """Take note of now; return the seconds since the last tick that do not count."""
        (lived, last), now = self._mark, time.monotonic()
        counted = USUAL if self._ticks and now - last > LONGEST else now - last
        self._mark, self._ticks = (lived + counted, now), True
        return now - last - counted

    def stop(self) -> None:
        """Be a plain clock again: there are no more ticks to come."""
        self.tick()
        self._ticks = False

    def __call__(self) -> float:
        """Return the seconds lived so far."""
        lived, last = self._mark
        passed = time.monotonic() - last
        return lived + (min(passed, LONGEST) if self._ticks else passed)
