"""A hundred races for one Run, each by four processes at once: never two owners."""

from __future__ import annotations

import json
from pathlib import Path

from test_owner import contender, first_line

from pipeline.run.owner import this_process

RACES, RACERS = 100, 4
DEAD = 2**22 - 3  # a pid that no process has


def test_a_hundred_races_have_one_winner_each(tmp_path: Path) -> None:
    winners = []
    for race in range(RACES):
        path = tmp_path / f"run-{race}" / "owner.json"
        path.parent.mkdir()
        if race % 2:  # every other time in the place of an owner that is dead
            path.write_text(json.dumps(this_process() | {"pid": DEAD}))
        racers = [contender(path) for _ in range(RACERS)]
        winners.append([first_line(racer) for racer in racers].count("owned"))
        for racer in racers:
            racer.kill()
            racer.wait()
    assert winners == [1] * RACES
