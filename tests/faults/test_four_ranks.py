"""Four ranks load what two have saved; too slow for every day, on a machine with few cores."""

from __future__ import annotations

from pathlib import Path

import ranks
from test_checkpoint_ranks import run_ranks


def test_four_ranks_load_what_two_have_saved(tmp_path: Path) -> None:
    ranks.save(tmp_path / "plain1", 1)
    run_ranks(2, tmp_path)
    run_ranks(4, tmp_path)
