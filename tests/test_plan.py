"""A Plan is pure data; its launch files are real bash that survives hostile paths."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from pipeline.cluster import Cluster
from pipeline.config import Config
from pipeline.errors import UserError
from pipeline.plan import STAGES, make_plan
from pipeline.run import Run

LAPTOP = Cluster(scheduler="local", python="/opt/env/bin/python", cores=8)

GOLDEN = """\
# Written by plan, sourced by sbatch/pretrain.sbatch.
SCHEDULER=local
PYTHON=/opt/env/bin/python
LAUNCH=(/opt/env/bin/python -m torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=0 --no-python \
--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2 --shutdown-timeout=600 \
/opt/env/bin/python -u)
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID \
TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS PYTHONHOME
export PYTHONPATH=/runs/golden/snapshot
export PYTHONUTF8=1
export PYTHONDONTWRITEBYTECODE=1
export GLOO_SOCKET_IFNAME=lo
export TORCHINDUCTOR_CACHE_DIR=/runs/golden/cache/inductor
export HF_HUB_OFFLINE=1
"""


def plan_of(root: str = "/runs/golden", **pretrain: object):
    config = Config.model_validate({"name": "golden", "pretrain": pretrain})
    return make_plan(config, LAPTOP, Run(Path(root)))


def test_chain_is_in_order_and_each_job_waits_for_the_one_before() -> None:
    jobs = plan_of().jobs
    assert tuple(job.stage for job in jobs) == STAGES
    assert [job.after for job in jobs] == [[], ["1"], ["2"], ["3"]]
    assert jobs[1].command == ["bash", "/runs/golden/snapshot/sbatch/pretrain.sbatch", "/runs/golden"]


def test_launch_file_of_two_ranks() -> None:
    assert plan_of(nproc_per_node=2).files["launch/pretrain.env"] == GOLDEN


def test_one_rank_needs_no_launcher() -> None:
    assert "LAUNCH=(/opt/env/bin/python -u)\n" in plan_of().files["launch/pretrain.env"]


def test_plan_is_json_and_computed_without_touching_the_disk(tmp_path: Path) -> None:
    plan = plan_of(str(tmp_path / "runs" / "x"))
    assert json.loads(json.dumps(plan.to_json()))["scheduler"] == "local"
    assert not any(tmp_path.iterdir())


def test_more_ranks_than_cores_are_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match=r"nproc_per_node: 16 ranks, but this machine has 8 cores"):
        plan_of(nproc_per_node=16, global_batch_size=16)


@pytest.mark.parametrize("name", ["with blank", "$(touch owned)", "a'b\"c", "semi;colon", "new\nline", "étoile"])
def test_hostile_folder_is_only_a_folder(tmp_path: Path, name: str) -> None:
    root = tmp_path / name
    root.mkdir()
    script = root / "launch.env"
    script.write_text(plan_of(str(root)).files["launch/pretrain.env"], encoding="utf-8")
    result = subprocess.run(
        ["bash", "-euc", 'source "$1"; printf %s "$PYTHONPATH"', "bash", str(script)],
        capture_output=True, text=True, cwd=tmp_path, check=True,
    )  # fmt: skip
    assert result.stdout == str(root / "snapshot")
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


def test_derived_values_come_with_their_arithmetic() -> None:
    derived = plan_of(global_batch_size=32, sequence_length=256, max_steps=500).derived
    assert derived["tokens per step"] == "8,192 = 32 sequences x 256"
    assert derived["tokens in all"] == "4,096,000 = 500 steps x 8,192"
