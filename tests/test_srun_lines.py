"""Every verb and every job script that starts srun starts it alike: shape, options, image, variables."""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import Fake, calls
from micro import PROJECT

from pipeline.cluster.load import open_cluster
from pipeline.cluster.schema import Cluster
from pipeline.config.load import load_config, load_run_config
from pipeline.files import write_json
from pipeline.plan.jobs import make_plan
from pipeline.run.folder import Run
from pipeline.submit.run_folder import prepare, run_of
from pipeline.submit.shell import shell_command

CLUSTER = """\
scheduler: slurm
gpus_per_node: 8
cpus_per_task: 16
mem: 64G
sbatch: {{partition: gpu, account: lm, wait-all-nodes: '1'}}
srun: {{mpi: pmix}}
secret_env: [HF_TOKEN]
secret_file: {folder}/secrets
image: {folder}/train.sqsh
image_cache: {folder}/local
python: /opt/env/bin/python
"""
STAGES = ("tokenize", "pretrain", "evaluate", "inference", "preflight")


@pytest.fixture
def run(tmp_path: Path, micro: Path) -> Run:
    """Return a Run that was planned for a cluster with an image, and has a checkpoint."""
    (tmp_path / "train.sqsh").write_bytes(b"hsqs" + b"x" * 1000)
    (tmp_path / "secrets").write_text("HF_TOKEN=hidden\n")
    (tmp_path / "secrets").chmod(0o600)
    (tmp_path / "ours.yaml").write_text(CLUSTER.format(folder=tmp_path))
    config = load_config(micro, ["pretrain.nodes=2", "pretrain.global_batch_size=8"])
    cluster = open_cluster(str(tmp_path / "ours.yaml"), sys.executable)
    made = run_of(config)
    prepare(made, config, make_plan(config, cluster, made), cluster)
    write_json(made.checkpoint(3) / "manifest.json", {"step": 3})
    return made


def arrays_of(run: Run, stage: str) -> dict[str, list[str]]:
    """Return each array of a launch file that starts srun, as bash reads it in a Job with 16 CPUs a task."""
    script = 'source "$1"; for a in LAUNCH PREFLIGHT CACHE_IMAGE; do declare -n w=$a; echo "$a ${w[*]@Q}"; done'
    done = subprocess.run(
        ["bash", "-ec", script, "bash", str(run.launch(stage))],
        env={"PATH": "/usr/bin:/bin", "SLURM_CPUS_PER_TASK": "16"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = {line.split()[0]: shlex.split(line)[1:] for line in done.stdout.splitlines()}
    return {name: found for name, found in words.items() if found}


def look_into_container(words: list[str], run: Run) -> None:
    """Check that what an srun line starts runs in the image, with the Run and all variables."""
    options = dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)
    assert options["--container-image"] == str(run.root.parents[1] / "train.sqsh")
    assert f"{run.root}:{run.root}:rw" in options["--container-mounts"].split(",")
    assert {"PYTHONPATH", "HF_TOKEN", "MASTER_ADDR", "NCCL_DEBUG"} <= set(options["--container-env"].split(","))
    assert {"--container-readonly", "--no-container-mount-home"} <= set(words)


@pytest.mark.parametrize("stage", STAGES)
def test_every_step_of_a_job_runs_in_the_image_but_the_copy_of_it(run: Run, stage: str) -> None:
    arrays = arrays_of(run, stage)
    assert set(arrays) == {"LAUNCH", "CACHE_IMAGE"} | ({"PREFLIGHT"} if stage == "pretrain" else set())
    for name, words in arrays.items():
        assert words[0] == "srun"
        assert "--mpi=pmix" in words
        assert ("--cpus-per-task=16" in words) == (
            (name != "PREFLIGHT" and stage != "preflight") or name == "CACHE_IMAGE"
        )
        if name != "CACHE_IMAGE":
            look_into_container(words, run)


VERBS = {"shell": ["--time", "30"], "generate": ["--prompt", "def "], "export": []}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_that_starts_srun_runs_in_the_image_as_the_jobs_do(run: Run, fake: Fake, verb: str) -> None:
    fake("srun", 'printf "%s\\n" "$@" > words; printenv > seen')
    words = [verb, str(run.root), *VERBS[verb]]
    code = f"import sys; sys.argv[1:] = {words!r}; from pipeline.cli.verbs import app; app()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert calls("srun"), done.stderr
    words = Path("words").read_text().splitlines()
    look_into_container(words, run)
    stage = "pretrain" if verb == "shell" else "inference"
    assert {"--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--partition=gpu", "--account=lm", "--mem=64G"} <= set(
        words
    )
    assert [word for word in words if word.startswith("--cpus-per-task")] == ["--cpus-per-task=16"]
    assert ("--pty" in words) == (verb == "shell")
    assert not any(word.startswith("--wait-all-nodes") for word in words)  # sbatch's alone
    seen = dict(line.split("=", 1) for line in Path("seen").read_text().splitlines() if "=" in line)
    launch = run.launch(stage).read_text()
    assert (seen["HF_TOKEN"], seen["PYTHONPATH"], seen["NCCL_DEBUG"]) == ("hidden", str(run.snapshot), "WARN")
    assert "hidden" not in launch + " ".join(words)


def test_a_shell_asks_for_what_pretrains_jobs_ask_for(run: Run) -> None:
    words = shell_command(run, load_run_config(run.config), "30")
    assert words[-2:] == ["bash", "-i"]
    assert {"--time=30", "--gres=gpu:1"} <= set(words)


def test_no_other_module_builds_an_srun_line() -> None:
    for path in (PROJECT / "pipeline").rglob("*.py"):
        lists = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.List)]
        first = {node.elts[0].value for node in lists if node.elts and isinstance(node.elts[0], ast.Constant)}
        asks = path.name == "commands.py"  # srun --help
        assert "srun" not in first or asks or path == PROJECT / "pipeline" / "plan" / "srun.py", path


def test_without_an_image_nothing_asks_for_one(run: Run, tmp_path: Path) -> None:
    bare = Cluster.model_validate({"name": "site", "gpus_per_node": 8})
    config = load_run_config(run.config)
    files = make_plan(config, bare, run).files
    assert not any("--container" in text for name, text in files.items() if name.startswith("launch/"))
