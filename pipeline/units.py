"""Numbers as people read them."""

from __future__ import annotations

import time


def duration(seconds: float | None) -> str:
    """Write seconds as M:SS, H:MM:SS or D-HH:MM:SS, the way Slurm does."""
    if seconds is None:
        return ""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}-{hour:02}:{minute:02}:{second:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minutes}:{second:02}"


def short(value: float | None) -> str:
    """Write a count with three digits or so and its magnitude: 412, 9.8k, 1.83M, 2.1T."""
    if value is None:
        return ""
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * limit:
            return f"{value / limit:.3g}{suffix}" if abs(value) < 999.5 * limit else f"{value / limit:,.0f}{suffix}"
    return f"{value:.3g}"


def size(count: float) -> str:
    """Write a count of bytes in powers of ten: 512 B, 11.4 MB, 2.1 TB, with a blank at which no line breaks."""
    number = short(count)
    digits, unit = (number[:-1], number[-1]) if number[-1].isalpha() else (number, "")
    return f"{digits}\N{NO-BREAK SPACE}{unit}B"


def moment(unix_seconds: float | None) -> str:
    """Write a time as local date and clock."""
    return "" if unix_seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_seconds))
