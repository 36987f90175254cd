"""A cluster file that a Slurm's own words make, and what is found out about a cluster before a Job is submitted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_slurm import squeue_list
from fakes import Fake, calls

from pipeline.cluster import doctor_paths
from pipeline.cluster.doctor import doctor
from pipeline.cluster.doctor_paths import Check
from pipeline.cluster.init import init_cluster
from pipeline.cluster.load import load_cluster
from pipeline.cluster.schema import Cluster
from pipeline.config.schema import Config
from pipeline.errors import UserError
from pipeline.slurm.commands import Slurm
from pipeline.slurm.errors import SlurmError
from pipeline.slurm.gres import gpus_in

Pipeline = Callable[..., "subprocess.CompletedProcess[str]"]

SINFO = "gpu*|up|1-00:00:00|16|128|2000000|gpu:h100:8(S:0-1)\ncpu|up|infinite|4|64|256000|(null)\nold|down|1:00:00|1|8|1000|(null)"
SETTINGS = """\
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = ours
KillWait                = 30 sec
MaxArraySize            = 1001
PreemptMode             = OFF
SLURM_VERSION           = 23.11.4
"""


HELD = squeue_list([{"id": "9", "state": "PENDING", "comment": "KEPT", "name": "pipeline-doctor"}])
SUBMIT = 'for word in "$@"; do [[ $word = --comment=* ]] && echo "${word#*=}" > comment; done; echo 9'


@pytest.fixture
def slurm(fake: Fake) -> Fake:
    """Put a Slurm on PATH in which all is well: two partitions, H100s, two accounts, Pyxis."""
    version = "[[ $1 = --version ]] && { echo 'slurm 23.11.4'; exit; }\n"
    fake("sinfo", f"{version}cat <<'END'\n{SINFO}\nEND")
    fake("scontrol", f"{version}[[ $* = *partition* ]] && {{ echo 'PartitionName=gpu GraceTime=0 PreemptMode=OFF'; exit; }}\n"
         f"cat <<'END'\n{SETTINGS}END")  # fmt: skip
    test = "[[ $* = *--test-only* ]] && { echo 'sbatch: Job 9 to start at 2026-01-01T00:00:00 in partition gpu' >&2; exit; }\n"
    fake("sbatch", f"{version}{test}{SUBMIT}")
    fake("srun", f"{version}echo '      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH'")
    fake("sacctmgr", f"{version}echo team-a; echo team-b; echo team-a")
    fake("squeue", f"{version}sed \"s/KEPT/$(cat comment)/\" <<'END'\n{HELD}END")
    fake("scancel", f"{version}exit 0")
    return fake


def cluster(**keys: object) -> Cluster:
    values = {"scheduler": "slurm", "name": "ours", "python": sys.executable, "host_python": sys.executable, **keys}
    return Cluster.model_validate(values)


def interpreter(folder: Path, built: str) -> str:
    """Make one that is this one, but for what its torch is built for."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\ncase $2 in *version.py*) echo {built};; *) exec {sys.executable} "$@";; esac\n')
    path.chmod(0o755)
    return str(path)


def checks(place: Cluster, **config: object) -> dict[str, Check]:
    """Return what is not as it should be, by name."""
    found, code = doctor(place, Config.model_validate({"name": "x", **config}) if config else None)
    bad = {check.name: check for check in found if check.state != "ok"}
    assert code == (3 if any(check.state == "fail" for check in found) else 0)
    assert all(check.remedy for check in bad.values())
    return bad


# init --cluster


def test_a_cluster_file_is_written_from_what_slurm_says(slurm: Fake, tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    init_cluster(path, Slurm())
    written = load_cluster(path, "/env/bin/python")
    assert written.sbatch == {"partition": "gpu", "account": "team-a"}
    assert (written.gpus_per_node, written.gpu_type, written.cores) == (8, "h100", 128)
    assert written.python == sys.executable
    text = path.read_text()
    for word in ("# or team-b", "# gpu*", "infinite", "KillWait, here 30 sec", "Slurm 23.11.4 named ours"):
        assert word in text
    assert "user=" in calls("sacctmgr")[0]


def test_a_partition_with_gpus_is_chosen_before_a_default_without(slurm: Fake, tmp_path: Path) -> None:
    slurm("sinfo", "echo 'cpu*|up|1:00:00|4|64|256000|(null)'; echo 'a: b|up|1:00:00|4|64|256000|gpu:2'")
    slurm("sacctmgr", "echo 'no accounting' >&2; exit 1")
    init_cluster(tmp_path / "ours.yaml", Slurm())
    written = load_cluster(tmp_path / "ours.yaml", "/env/bin/python")
    assert (written.sbatch, written.gpus_per_node, written.gpu_type) == ({"partition": "a: b"}, 2, None)


def test_without_gpus_none_are_asked_for(slurm: Fake, tmp_path: Path) -> None:
    slurm("sinfo", "echo 'cpu*|up|1:00:00|4|64+|256000|(null)'")
    init_cluster(tmp_path / "ours.yaml", Slurm())
    written = load_cluster(tmp_path / "ours.yaml", "/env/bin/python")
    assert (written.gpus_per_node, written.cores) == (None, 64)


def test_a_file_that_is_there_is_not_written_over(slurm: Fake, tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text("mine")
    with pytest.raises(UserError, match="is not written over"):
        init_cluster(path, Slurm())
    assert path.read_text() == "mine"


@pytest.mark.usefixtures("fake")
def test_without_a_slurm_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match="sinfo"):
        init_cluster(tmp_path / "ours.yaml", Slurm())
    assert not (tmp_path / "ours.yaml").exists()


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:h100:8(S:0-1),shard:16", [("h100", 8)]),
        ("gpu:4", [("", 4)]),
        ("gpu", [("", 1)]),
        ("gpu:a100_1g.5gb:7,gpu:a100:1", [("a100_1g.5gb", 7), ("a100", 1)]),
        ("craynetwork:4", []),
        ("", []),
    ],
)
def test_gres_is_read(gres: str, gpus: list[tuple[str, int]]) -> None:
    assert gpus_in(gres) == gpus


# doctor


@pytest.mark.usefixtures("slurm")
def test_where_all_is_well_nothing_is_said(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "2.9.0+cu128 12.8")
    assert checks(cluster(gpus_per_node=8, gpu_type="h100", sbatch={"account": "team-b"}, python=python)) == {}


@pytest.mark.usefixtures("slurm")
def test_sbatch_itself_is_asked_with_the_options_of_a_job() -> None:
    checks(
        cluster(gpus_per_node=8, gpu_flag="gpus-per-node", sbatch={"qos": "high"}),
        pretrain={"nodes": 2, "nproc_per_node": 8},
    )
    request = next(call for call in calls("sbatch") if "--test-only" in call)
    assert request == (
        "--test-only --nodes=2 --ntasks-per-node=1 --time=0-01:00:00 --gpus-per-node=8 --qos=high --wrap=true"
    )


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    ("keys", "config", "name", "found", "remedy"),
    [
        ({"sbatch": {"partition": "gpux"}}, {}, "partition of pretrain", "none of this name", "write one of cpu, gpu, old"),
        ({"sbatch": {"partition": "old"}}, {}, "partition of pretrain", "takes no Jobs", "ask an administrator"),
        ({}, {"pretrain": {"time": "2-00"}}, "partition of pretrain", "pretrain.time is 2-00:00:00", "set pretrain.time to 1-00"),
        ({}, {"pretrain": {"nodes": 17, "global_batch_size": 17}}, "partition of pretrain", "pretrain.nodes is 17", "lower"),
        ({"gpus_per_node": 9}, {}, "GPUs", "gpu:h100:8(S:0-1) registered", "set gpus_per_node to 8 or less"),
        ({"gpus_per_node": 8, "gpu_type": "a100"}, {}, "GPUs", "8 a100 asked for", "the types in this partition: h100"),
        ({"gpus_per_node": 4}, {"pretrain": {"nproc_per_node": 8}}, "GPUs", "nproc_per_node is 8", "to 4 or less"),
        ({"sbatch": {"account": "other"}}, {}, "account", "other; yours: team-a, team-b", "mend account"),
        ({"signal_lead": 300}, {"pretrain": {"time": 10}}, "time to save", "pretrain.time 0-00:10:00", "lower signal_lead"),
        ({"python": "/nowhere/python"}, {}, "python", "/nowhere/python", "write python in the cluster file"),
        ({"image": "/nowhere/train.sqsh"}, {}, "image", "no such file", "nox -s image"),
        ({"state_dir": "/etc/passwd/state"}, {}, "state_dir", "you may not write there", "choose another folder"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_what_to_do(
    keys: dict[str, object], config: dict[str, object], name: str, found: str, remedy: str
) -> None:
    check = checks(cluster(**keys), **config)[name]
    assert check.state == "fail"
    assert found in check.found
    assert remedy in check.remedy


def test_an_image_needs_pyxis_and_brings_its_own_python(slurm: Fake, tmp_path: Path) -> None:
    (tmp_path / "train.sqsh").touch()
    place = cluster(image=str(tmp_path / "train.sqsh"), python="/only/in/the/image")
    assert checks(place) == {}
    slurm("srun", "[[ $1 = --version ]] && { echo 'slurm 23.11.4'; exit; }\necho '      --chdir=dir'")
    bad = checks(place)
    assert list(bad) == ["containers"]
    assert "no --container-image (Pyxis), and image is set" in bad["containers"].found


def test_a_refusal_comes_with_what_was_asked_for(slurm: Fake) -> None:
    slurm("sbatch", "[[ $1 = --version ]] && { echo 'slurm 23.11.4'; exit; }\n"
          "echo 'sbatch: error: Invalid generic resource (gres) specification' >&2; exit 1")  # fmt: skip
    check = checks(cluster(gpus_per_node=8))["sbatch --test-only"]
    assert "Invalid generic resource" in check.found
    assert "--gres=gpu:8" in check.found
    assert "gpu_flag" in check.remedy


def test_a_preemption_that_leaves_too_little_time_is_a_warning(slurm: Fake) -> None:
    slurm("scontrol", "[[ $1 = --version ]] && { echo 'slurm 23.11.4'; exit; }\n"
          "[[ $* = *partition* ]] && { echo 'PartitionName=gpu GraceTime=10 PreemptMode=REQUEUE'; exit; }\n"
          f"cat <<'END'\n{SETTINGS}END")  # fmt: skip
    check = checks(cluster())["time to save"]
    assert check.state == "warn"
    assert "leaves 40 s" in check.remedy
    assert checks(cluster(signal_lead=60, sbatch={"partition": "gpu"})).get("time to save") is not None


def test_a_slurm_that_is_too_old_or_missing_ends_the_questions(slurm: Fake) -> None:
    for name in ("sbatch", "squeue", "scontrol", "scancel", "sinfo", "srun"):
        slurm(name, "echo 'slurm 19.05.1'")
    assert "20.11" in checks(cluster())["commands"].remedy
    slurm("sbatch", "echo 'sbatch: error: no' >&2; exit 1")
    assert "no" in checks(cluster())["sbatch"].found


def test_a_site_that_rewrites_comments_is_found_out_by_a_job_that_is_held_and_cancelled(slurm: Fake) -> None:
    assert checks(cluster()) == {}
    held = next(call for call in calls("sbatch") if "--hold" in call)
    assert "--comment=pipeline:doctor:" in held
    assert calls("scancel")[-1] == "9"
    slurm("sbatch", "[[ $1 = --version ]] && { echo 'slurm 23.11.4'; exit; }\n"
          "[[ $* = *--test-only* ]] && exit; echo account=7 > comment; echo 9")  # fmt: skip
    check = checks(cluster())["comments"]
    assert check.state == "fail"
    assert "kept account=7" in check.found
    assert check.remedy == "write job_mark: name into the cluster file"
    assert checks(cluster(job_mark="name")) == {}
    assert calls("scancel")[-1] == "9"


def test_without_accounting_that_is_no_failure(slurm: Fake) -> None:
    settings = SETTINGS.replace("slurmdbd", "none")
    slurm("scontrol", f"[[ $1 = --version ]] && {{ echo 'slurm 23.11.4'; exit; }}\ncat <<'END'\n{settings}END")
    slurm("sacctmgr", "exit 1")
    assert checks(cluster()) == {}
    assert calls("sacctmgr") == []


@pytest.mark.usefixtures("slurm")
def test_an_interpreter_without_what_stages_import_is_found(tmp_path: Path) -> None:
    python = tmp_path / "python"  # knows what the job scripts need, and no torch
    python.write_text(f'#!/bin/sh\ncase $2 in *find_spec*) echo torch;; *) exec {sys.executable} "$@";; esac\n')
    python.chmod(0o755)
    check = checks(cluster(python=str(python)))["python"]
    assert (check.state, check.found.endswith("has no torch")) == ("fail", True)
    assert "pip install '.[train]'" in check.remedy


@pytest.mark.parametrize(
    ("built", "state"), [("2.9.0+cpu none", "fail"), ("2.9.0+cu128 12.8", "ok"), ("2.9.0+rocm6.4 6.4", "ok")]
)
@pytest.mark.usefixtures("slurm")
def test_a_torch_that_can_use_no_gpu_is_found_before_node_after_node_fails(
    tmp_path: Path, built: str, state: str
) -> None:
    python = interpreter(tmp_path, built)
    found, _ = doctor(cluster(gpus_per_node=8, python=python), None)
    (check,) = [check for check in found if check.name == "torch"]
    assert check.state == state
    if state == "fail":
        assert check.found == f"torch 2.9.0+cpu of {python} is built without CUDA, and 8 GPUs a node are asked for"
    assert "torch" not in checks(cluster(python=python))  # no GPU is asked for


@pytest.mark.usefixtures("slurm")
def test_this_interpreters_own_torch_says_what_it_is_built_for() -> None:
    """By its files alone; and one that hangs or says nothing is no failure of torch."""
    import torch

    (check,) = [check for check in doctor(cluster(gpus_per_node=8), None)[0] if check.name == "torch"]
    assert torch.__version__ in check.found
    assert check.state == ("ok" if torch.version.cuda else "fail")


@pytest.mark.usefixtures("slurm")
def test_an_interpreter_that_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase $2 in *version.py*) exec sleep 600;; *) exec {sys.executable} "$@";; esac\n')
    python.chmod(0o755)
    monkeypatch.setattr(doctor_paths, "PYTHON_SECONDS", 3.0)
    assert [check.name for check in doctor(cluster(gpus_per_node=8, python=str(python)), None)[0]].count("torch") == 0


@pytest.mark.usefixtures("slurm")
def test_folders_are_looked_at_where_they_are_or_will_be(tmp_path: Path) -> None:
    hostile = tmp_path / "a b; $(touch owned)" / "deeper"
    found, _ = doctor(cluster(state_dir=str(hostile)), None)
    (check,) = [check for check in found if check.name == "state_dir"]
    assert check.state in ("ok", "warn")  # by the file system that tests run on
    assert str(hostile) in check.found
    assert not hostile.parent.exists()
    assert not (tmp_path / "owned").exists()


@pytest.mark.usefixtures("slurm")
def test_the_verbs(pipeline: Pipeline, tmp_path: Path) -> None:
    assert pipeline("init").returncode == 2
    written = pipeline("init", "--cluster", "ours.yaml")
    assert written.returncode == 0, written.stderr
    assert "doctor --cluster ours.yaml" in written.stdout
    again = pipeline("init", "--cluster", "ours.yaml")
    assert (again.returncode, "is there already" in again.stderr) == (2, True)
    with_cuda = interpreter(tmp_path, "2.9.0+cu128 12.8")
    text = (tmp_path / "ours.yaml").read_text()
    (tmp_path / "ours.yaml").write_text(text.replace(f"\npython: {sys.executable}", f"\npython: {with_cuda}"))
    well = pipeline("doctor", "--cluster", "ours.yaml")
    assert well.returncode == 0, well.stdout
    assert "GPUs" in well.stdout
    ill = pipeline("doctor", "--cluster", "ours.yaml", "pretrain.time=9-00", "--json")
    result = json.loads(ill.stdout)
    assert (ill.returncode, result["ready"]) == (3, False)
    assert [check["name"] for check in result["checks"] if check["state"] == "fail"] == ["partition of pretrain"]
    assert pipeline("doctor").returncode == pipeline("doctor", "--cluster", "local").returncode == 2
