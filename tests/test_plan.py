"""A Plan is pure data; its launch files are real bash that survives hostile paths."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from pipeline.cluster.schema import Cluster
from pipeline.config.schema import Config
from pipeline.errors import UserError
from pipeline.plan.jobs import STAGES, Measured, make_plan
from pipeline.run.folder import Run

PYTHON = "/opt/env/bin/python"
LAPTOP = Cluster(scheduler="local", python=PYTHON, host_python=PYTHON, cores=8)
SITE = Cluster.model_validate(
    {
        "name": "site", "python": PYTHON, "host_python": "/usr/bin/python3", "cores": 64, "gpus_per_node": 8,
        "sbatch": {"partition": "gpu", "reservation": "week 7"}, "srun": {"cpu-bind": "cores"}, "cpus_per_task": 16,
        "env": {"NCCL_IB_HCA": "=mlx5_0,mlx5_1"},
    }
)  # fmt: skip

GOLDEN = """\
# Written by plan, sourced by sbatch/pretrain.sbatch.
SCHEDULER=local
PYTHON=/opt/env/bin/python
PREFLIGHT=()
LAUNCH=(/opt/env/bin/python -m torch.distributed.run --max-restarts=0 --no-python \
--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2 --shutdown-timeout=600 --standalone --nproc-per-node=2 \
/opt/env/bin/python -u)
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID \
TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS PYTHONHOME
export PYTHONPATH=/runs/golden/snapshot
export PYTHONSAFEPATH=1
export PYTHONUTF8=1
export PYTHONDONTWRITEBYTECODE=1
export OMP_NUM_THREADS=1
export GLOO_SOCKET_IFNAME=lo
export TORCHINDUCTOR_CACHE_DIR=/runs/golden/cache/inductor
export HF_HUB_OFFLINE=1
SECRETS=()
"""


def plan_of(
    root: str = "/runs/golden", cluster: Cluster = LAPTOP, measured: Measured | None = None, **pretrain: object
):
    config = Config.model_validate({"name": "golden", "pretrain": pretrain})
    return make_plan(config, cluster, Run(Path(root)), measured)


def test_chain_is_in_order_and_each_job_waits_for_the_one_before() -> None:
    jobs = plan_of().jobs
    assert tuple(job.stage for job in jobs) == STAGES
    assert [job.after for job in jobs] == [[], ["afterok:tokenize"], ["afterok:pretrain"], ["afterok:pretrain"]]
    assert jobs[1].command == ["bash", "/runs/golden/snapshot/sbatch/pretrain.sbatch", "/runs/golden"]


def test_launch_file_of_two_ranks() -> None:
    assert plan_of(nproc_per_node=2).files["launch/pretrain.env"] == GOLDEN


def test_one_rank_needs_no_launcher() -> None:
    assert "LAUNCH=(/opt/env/bin/python -u)\n" in plan_of().files["launch/pretrain.env"]


GOLDEN_SLURM = """\
# Written by plan, sourced by sbatch/pretrain.sbatch.
SCHEDULER=slurm
PYTHON=/usr/bin/python3
MAY_SUBMIT=1
PREFLIGHT=(srun --kill-on-bad-exit=1 --overcommit --nodes=2 --ntasks=16 --ntasks-per-node=8 --cpu-bind=cores \
bash /runs/golden/snapshot/sbatch/rank.sh /opt/env/bin/python -u)
TORCHRUN=(/opt/env/bin/python -m torch.distributed.run --max-restarts=0 --no-python \
--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2 --shutdown-timeout=600 --nproc-per-node=8)
LAUNCH=(srun --kill-on-bad-exit=1 --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpu-bind=cores \
${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} bash /runs/golden/snapshot/sbatch/node.sh \
"${TORCHRUN[@]}" -- /opt/env/bin/python -u)
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID \
TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS PYTHONHOME
export PYTHONPATH=/runs/golden/snapshot
export PYTHONSAFEPATH=1
export PYTHONUTF8=1
export PYTHONDONTWRITEBYTECODE=1
export OMP_NUM_THREADS=1
export TORCHINDUCTOR_CACHE_DIR=/runs/golden/cache/inductor
export HF_HUB_OFFLINE=1
export PIPELINE_GPUS_PER_NODE=8
export NCCL_DEBUG=WARN
export NCCL_IB_HCA==mlx5_0,mlx5_1
export PIPELINE_EXPECTED_ENV='{"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "=mlx5_0,mlx5_1"}'
SECRETS=()
"""
TWO_NODES = {"nodes": 2, "nproc_per_node": 8, "global_batch_size": 16}


STATIC = SITE.model_copy(update={"nodes_may_submit": False})


def test_launch_file_of_two_nodes_on_slurm() -> None:
    assert plan_of(cluster=SITE, **TWO_NODES).files["launch/pretrain.env"] == GOLDEN_SLURM


def test_sbatch_line_of_a_segment() -> None:
    jobs = plan_of(cluster=STATIC, segments=2, time="1-00:00:00", **TWO_NODES).jobs
    assert [job.name for job in jobs] == ["tokenize", "pretrain-1", "pretrain-2", "evaluate", "inference"]
    assert [job.after for job in jobs][1:] == [
        ["afterok:tokenize", "singleton"], ["afterok:tokenize", "afterany:pretrain-1", "singleton"],
        ["afterany:pretrain-2"], ["afterany:pretrain-2"],
    ]  # fmt: skip
    assert jobs[2].command == [
        "sbatch", "--parsable", "--job-name=golden-pretrain-<id>", "--output=/dev/null",
        "--chdir=/runs/golden", "--requeue", "--nodes=2", "--ntasks-per-node=1", "--time=1-00:00:00", "--signal=B:USR2@120",
        "--gres=gpu:8", "--cpus-per-task=16", "--partition=gpu", "--reservation=week 7",
        "--dependency=afterok:<tokenize>,afterany:<pretrain-1>,singleton", "/runs/golden/snapshot/sbatch/pretrain.sbatch", "/runs/golden",
    ]  # fmt: skip


def test_a_segment_may_be_given_less_time_where_that_fits_a_hole() -> None:
    jobs = plan_of(cluster=SITE, time="1-00:00:00", time_min="2:00:00", **TWO_NODES).jobs
    words = {job.name: " ".join(job.command) for job in jobs}
    assert "--time=1-00:00:00 --time-min=0-02:00:00" in words["pretrain"]
    assert "--no-requeue" in words["pretrain"]  # its successor goes on
    assert "--requeue" in words["evaluate"]
    assert "--time-min" not in words["tokenize"] + words["evaluate"]


def test_where_nodes_may_submit_one_segment_is_planned_and_each_queues_the_next() -> None:
    plan = plan_of(cluster=SITE, segments=100, **TWO_NODES)
    assert [(job.name, job.after) for job in plan.jobs] == [
        ("tokenize", []), ("pretrain", ["afterok:tokenize", "singleton"]), ("evaluate", ["afterany:pretrain"]),
        ("inference", ["afterany:pretrain"]),
    ]  # fmt: skip
    assert plan.derived["Segments"] == "100: as the key pretrain.segments says; each queues the next when it begins"


def test_all_segments_of_a_run_have_one_name() -> None:
    jobs = plan_of(cluster=STATIC, segments=3, **TWO_NODES).jobs
    assert [job.flags["job-name"] for job in jobs if job.stage == "pretrain"] == ["golden-pretrain-<id>"] * 3


def test_one_rank_per_task_where_the_cluster_wants_srun_to_start_them() -> None:
    plan = plan_of(cluster=SITE.model_copy(update={"launcher": "srun"}), **TWO_NODES)
    launch = plan.files["launch/pretrain.env"]
    assert "--ntasks-per-node=8" in launch
    assert "torch.distributed.run" not in launch
    assert "--ntasks-per-node=8" in plan.jobs[1].command


def test_segments_are_counted_by_the_measured_speed() -> None:
    steps = {"max_steps": 1000, "global_batch_size": 16, "sequence_length": 512, "time": "1:00:00"}
    assert len(plan_of(cluster=STATIC, **steps).jobs) == 4  # one Segment, which can tell the speed
    tokens = 1000 * 16 * 512
    measured = Measured(step=0, tokens_per_s=tokens / (2.5 * 3600))
    names = [job.name for job in plan_of(cluster=STATIC, measured=measured, **steps).jobs]
    assert names[1:4] == ["pretrain-1", "pretrain-2", "pretrain-3"]  # 2.5 h / (1 h - start-up - warning)
    nearly = Measured(step=900, tokens_per_s=measured.tokens_per_s)
    assert [job.name for job in plan_of(cluster=STATIC, measured=nearly, **steps).jobs][1] == "pretrain"
    rolling = plan_of(cluster=SITE, measured=measured, **steps)
    assert [job.name for job in rolling.jobs] == list(STAGES)
    assert rolling.derived["Segments"].startswith("3: 2.5 h left at ")


def test_what_failures_cost_is_estimated_from_what_was_measured() -> None:
    measured = Measured(tokens_per_s=1e5, save_seconds=30.0, stall_seconds=0.5, restart_seconds=180.0)
    derived = plan_of(cluster=SITE, measured=measured, nodes=100, nproc_per_node=8, global_batch_size=800).derived
    assert derived["failures"].startswith("one in 1.5 days = node_mtbf_days 150 / 100 nodes; each costs 300 s")
    assert "best is every" in derived["effective time"]
    assert "queue not counted" in derived["days left"]


def test_how_likely_its_own_rules_end_a_healthy_chain_is_told() -> None:
    """1,000 nodes, six weeks, 20 min to the first save: two random failures in a row ended 86 of 100 such chains."""
    six_weeks = {"nodes": 1000, "nproc_per_node": 8, "global_batch_size": 8000, "save_interval": 1080}
    tokens_per_s = 8000 * 512 / 1.0  # a step takes a second
    steps = {"max_steps": 42 * 86_400, "sequence_length": 512} | six_weeks
    measured = Measured(tokens_per_s=tokens_per_s)
    told = plan_of(cluster=SITE, measured=measured, **steps).derived["own rules"]
    assert told == (
        "0.68% that random failures alone end the chain (no_progress) in 42.0 days: one in 3.6 h, 8.8% of them before "
        "the first save, after 20 min"
    )
    rare = plan_of(cluster=SITE, measured=measured, **steps | {"save_interval": 10_800}).derived["own rules"]
    assert rare.endswith("after 182 min; lower pretrain.save_interval")
    assert "own rules" not in plan_of(cluster=SITE, **steps).derived  # nothing is known of its speed
    guessed = plan_of(cluster=SITE, segments=42, time="1-00:00:00", **steps).derived["own rules"]
    assert guessed.startswith("0.6")
    assert guessed.endswith("; if training takes all of its Segments")


def test_the_warning_comes_earlier_where_saves_are_slow() -> None:
    slow = plan_of(cluster=SITE, measured=Measured(save_seconds=200.0)).jobs[1].command
    assert "--signal=B:USR2@600" in slow


def test_a_plan_of_1000_nodes_and_100_segments_names_every_job() -> None:
    plan = plan_of(cluster=STATIC, nodes=1000, nproc_per_node=8, segments=100, global_batch_size=8000)
    assert len({job.name for job in plan.jobs}) == 103
    assert plan.jobs[50].ranks == 8000


def test_in_an_image_only_the_run_may_be_written_and_every_variable_wins_over_the_images() -> None:
    image = SITE.model_copy(update={"image": "/images/train.sqsh", "mounts": ["/scratch:/scratch:rw", "/opt:/opt"]})
    config = Config.model_validate(
        {"name": "golden", "data": ["/corpus/a/*.txt", "/corpus/b.jsonl", "/corpus/a/deep", "python-stdlib"]}
    )
    launch = make_plan(config, image, Run(Path("/runs/golden"))).files["launch/tokenize.env"]
    (line,) = [line for line in launch.splitlines() if line.startswith("LAUNCH=")]
    words = line.removeprefix("LAUNCH=(").removesuffix(")").split()
    assert "--container-image=/images/train.sqsh" in words
    assert (
        "--container-mounts=/runs/golden:/runs/golden:rw,/runs/golden/snapshot:/runs/golden/snapshot:ro,"
        "/corpus:/corpus:ro,/scratch:/scratch:rw,/opt:/opt:ro" in words
    )
    assert {"--no-container-mount-home", "--container-readonly", "--container-workdir=/runs/golden"} <= set(words)
    (named,) = [word for word in words if word.startswith("--container-env=")]
    exported = {
        line.split("=")[0].removeprefix("export ") for line in launch.splitlines() if line.startswith("export ")
    }
    assert exported | {"MASTER_ADDR", "PIPELINE_ATTEMPT"} <= set(named.removeprefix("--container-env=").split(","))


def test_each_node_copies_the_image_first_where_the_cluster_has_a_place_for_it() -> None:
    cluster = SITE.model_copy(update={"image": "/images/train.sqsh", "image_cache": "/local/a b"})
    files = plan_of(cluster=cluster, **TWO_NODES).files
    assert (
        "IMAGE_CACHE='/local/a b'\nCACHE_IMAGE=(srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpu-bind=cores "
        '${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} /usr/bin/python3 -m pipeline.image.cache)\n'
    ) in files["launch/pretrain.env"]
    assert "CACHE_IMAGE=(srun --nodes=1 --ntasks=1 " in files["launch/evaluate.env"]
    assert "--container-image=/images/train.sqsh" in files["launch/pretrain.env"]  # the script puts the copy there
    assert "CACHE_IMAGE" not in plan_of(cluster=SITE).files["launch/pretrain.env"]


def test_a_variable_of_several_lines_is_not_named_to_pyxis_which_would_make_variables_of_them() -> None:
    cluster = SITE.model_copy(update={"image": "/images/train.sqsh", "env": {"LINES_": "a\nLD_PRELOAD=x", "B": "a b"}})
    launch = plan_of(cluster=cluster).files["launch/pretrain.env"]
    named = re.search(r"--container-env=(\S+)", launch)[1].split(",")
    assert {"B", "PIPELINE_EXPECTED_ENV"} <= set(named)
    assert "LINES_" not in named
    script = 'eval "$1"; printf %s "$LINES_"'
    done = subprocess.run(["bash", "-euc", script, "bash", launch], capture_output=True, text=True, check=True)
    assert done.stdout == "a\nLD_PRELOAD=x"


@pytest.mark.parametrize("name", ["a,b", "a:b", 'a"b', "$(touch${IFS}owned)", "`id`"])
def test_a_folder_that_enroot_would_read_as_something_else_is_not_mounted(name: str) -> None:
    """Enroot's bash reads mounts in double quotes: what such a name says would be run on every node."""
    cluster = SITE.model_copy(update={"image": "/images/train.sqsh"})
    with pytest.raises(UserError, match="cannot be mounted into a container"):
        plan_of(f"/runs/{name}", cluster)
    config = Config.model_validate({"name": "golden", "data": [{"path": f"/data/{name}/x.txt"}]})
    with pytest.raises(UserError, match="cannot be mounted into a container"):
        make_plan(config, cluster, Run(Path("/runs/golden")))
    assert plan_of(f"/runs/{name}", SITE).jobs  # where stages run without a container it is only a folder


def test_all_that_a_config_names_outside_the_run_is_mounted_read_only() -> None:
    keys = {
        "data": [{"path": "/a/*.txt"}, {"dataset": "/b/set"}, {"dataset": "owner/name"}, {"path": "python-stdlib"}],
        "tokenize": {"tokenizer": "/c/tokenizer.model"},
        "pretrain": {"init_from": "/d/model.v1"},
        "evaluate": {"benchmarks": [{"name": "q", "kind": "cloze", "path": "/e/q.jsonl"}]},
        "inference": {"prompts_file": "/f/prompts.txt"},
    }
    cluster = SITE.model_copy(update={"image": "/images/train.sqsh"})
    plan = make_plan(Config.model_validate({"name": "golden"} | keys), cluster, Run(Path("/runs/golden")))
    mounts = re.search(r"--container-mounts=(\S+)", plan.files["launch/tokenize.env"])[1].split(",")
    assert [mount for mount in mounts if not mount.startswith("/runs")] == [
        f"{folder}:{folder}:ro" for folder in ("/a", "/b/set", "/c", "/d/model.v1", "/e", "/f")
    ]


@pytest.mark.parametrize(("cpus", "wanted"), [({}, []), ({"SLURM_CPUS_PER_TASK": "16"}, ["--cpus-per-task=16"])])
def test_a_step_asks_for_cpus_only_where_its_job_did(cpus: dict[str, str], wanted: list[str]) -> None:
    launch = plan_of(cluster=SITE, **TWO_NODES).files["launch/pretrain.env"]
    words = ["bash", "-euc", 'eval "$1"; printf "%s\\n" "${LAUNCH[@]}" "${PREFLIGHT[@]}"', "bash", launch]
    done = subprocess.run(words, env={"PATH": "/usr/bin:/bin"} | cpus, capture_output=True, text=True, check=True)
    assert [word for word in done.stdout.split("\n") if word.startswith("--cpus")] == wanted


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


HOSTILE = 'it\'s "$(touch owned)"; `touch owned` & \\ *'


def test_hostile_values_are_only_words_of_the_launch_file(tmp_path: Path) -> None:
    """Each array of words, and each variable, is after bash has read it what the cluster file says."""
    changes = {
        "image": f"/{HOSTILE}.sqsh", "image_cache": f"/{HOSTILE}", "python": f"/{HOSTILE}/python",
        "host_python": f"/{HOSTILE}/host", "env": {"WORDS": HOSTILE}, "srun": {"comment": HOSTILE},
    }  # fmt: skip
    files = plan_of(cluster=SITE.model_copy(update=changes), **TWO_NODES).files
    arrays = '"${LAUNCH[@]}" "${PREFLIGHT[@]}" "${CACHE_IMAGE[@]}" "$PYTHON" "$IMAGE_CACHE" "$WORDS"'
    for stage in STAGES:
        script = f'PREFLIGHT=(); eval "$1"; printf "%s\\0" {arrays}'
        words = ["bash", "-euc", script, "bash", files[f"launch/{stage}.env"]]
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=True)
        got = done.stdout.split("\0")
        wanted = {changes["python"], changes["host_python"], f"--comment={HOSTILE}", f"/{HOSTILE}", HOSTILE}
        assert wanted | {f"--container-image=/{HOSTILE}.sqsh"} <= set(got)
        assert not any("owned" in word for word in set(got) - wanted if HOSTILE not in word)
    assert not any(tmp_path.iterdir())


def test_derived_values_come_with_their_arithmetic() -> None:
    derived = plan_of(global_batch_size=32, sequence_length=256, max_steps=500).derived
    assert derived["tokens per step"] == "8,192 = 32 sequences x 256"
    assert derived["tokens in all"] == "4,096,000 = 500 steps x 8,192"
