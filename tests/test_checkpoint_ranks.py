"""A checkpoint loads at another number of ranks, sharded or not, and ranks act alike when one of them has trouble."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ranks
from parallel_ranks import begin_alone
from rank_processes import run_ranks


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what one and two ranks have saved; two_ranks has its own checks."""
    root = tmp_path_factory.mktemp("ranks")
    ranks.save(root / "plain1", 1)
    begin_alone(root)
    run_ranks("ranks.py", 2, root)
    return root


@pytest.mark.parametrize("kind", ["plain2", "sharded2"])
def test_one_rank_loads_what_two_have_saved(root: Path, kind: str) -> None:
    assert ranks.check(root / kind, 2) == []


def test_each_rank_writes_a_part_and_each_element_is_written_once(root: Path) -> None:
    for kind in ("plain2", "sharded2"):
        checkpoint = root / kind / "step-00000002"
        tensors = json.loads((checkpoint / "tensors.json").read_text())["tensors"]
        files = {chunk["file"] for tensor in tensors.values() for chunk in tensor["chunks"]}
        assert files == {"rank-00000.bin", "rank-00001.bin"}
        assert sorted(p.name for p in checkpoint.iterdir()) == sorted([*files, "tensors.json", "manifest.json"])
