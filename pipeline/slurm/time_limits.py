"""Time limits as Slurm writes them."""

from __future__ import annotations

import re

FORMS = "D-HH:MM:SS, D-HH:MM, D-HH, HH:MM:SS, MM:SS, or a whole number of minutes"
LONGEST = 3650 * 24 * 60  # minutes: ten years
SHAPE = re.compile(
    r"(?P<days>[0-9]{1,6})-(?P<dhours>[0-9]{1,2})(?::(?P<dminutes>[0-9]{1,2})(?::(?P<dseconds>[0-9]{1,2}))?)?"
    r"|(?P<hours>[0-9]{1,6}):(?P<minutes>[0-9]{1,2}):(?P<seconds>[0-9]{1,2})"
    r"|(?P<only_minutes>[0-9]{1,9})(?::(?P<only_seconds>[0-9]{1,2}))?"
)


def canonical_time(text: str) -> str:
    """Return a time limit as D-HH:MM:SS; ValueError says what is wrong.

    Seconds are rounded up to a whole minute, Slurm's resolution.
    """
    shape = SHAPE.fullmatch(text.strip())
    if shape is None:
        raise ValueError(f"is not a time limit; write {FORMS}")
    parts = {name: int(digits or 0) for name, digits in shape.groupdict().items()}
    seconds = parts["dseconds"] + parts["seconds"] + parts["only_seconds"]
    within_hour = parts["dminutes"] + parts["minutes"]
    if seconds > 59 or within_hour > 59 or parts["dhours"] > 23:
        raise ValueError(
            "is not a time limit: minutes and seconds end at 59, hours after days at 23; write for example 1-12:30:00"
        )
    hours = parts["days"] * 24 + parts["dhours"] + parts["hours"]
    minutes = hours * 60 + within_hour + parts["only_minutes"] + (seconds > 0)
    if minutes == 0:
        raise ValueError("gives no time at all; write at least 1 minute")
    if minutes > LONGEST:
        raise ValueError("is more than ten years; write less")
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"


def time_seconds(canonical: str) -> int:
    """Return the seconds of a time limit of the form D-HH:MM:SS."""
    days, clock = canonical.split("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
