"""A cluster file is read like a config: as people mean it, or refused with all of its mistakes at once."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PROJECT
from test_config import PYDANTIC_WORDS, WILD, possible_errors

from pipeline.cluster.load import load_cluster, open_cluster
from pipeline.cluster.parts import Options
from pipeline.cluster.schema import OTHER_NAMES, Cluster
from pipeline.config.errors import WORDS, ConfigError
from pipeline.config.evaluate import EvaluateConfig
from pipeline.config.hints import section_in
from pipeline.config.pretrain import PretrainConfig
from pipeline.errors import UserError
from pipeline.slurm.commands import Slurm

Load = Callable[[str], Cluster]
Refuse = Callable[[str], list[str]]
FILES = sorted((PROJECT / "configs" / "clusters").glob("*.yaml"))


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load(text: str) -> Cluster:
        path = tmp_path / "ours.yaml"
        path.write_text(text or "scheduler: slurm")
        return load_cluster(path, "/env/bin/python")

    return load


@pytest.fixture
def refuse(load: Load, tmp_path: Path) -> Refuse:
    """Load a cluster file that has mistakes; return them, one a line, without the folder."""

    def refuse(text: str) -> list[str]:
        with pytest.raises(ConfigError) as error:
            load(text)
        message = str(error.value).replace(f"{tmp_path}/", "")
        assert not PYDANTIC_WORDS.search(message)
        first, *lines = message.splitlines()
        assert first == f"{len(lines)} mistake{'s' if len(lines) > 1 else ''} in ours.yaml:"
        return lines

    return refuse


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_shipped_cluster_file_loads(path: Path) -> None:
    assert load_cluster(path, sys.executable).name == path.stem


def test_little_has_to_be_written(load: Load) -> None:
    cluster = load("scheduler: slurm")
    assert cluster == Cluster(scheduler="slurm", name="ours", python="/env/bin/python", host_python="/env/bin/python")
    assert (cluster.launcher, cluster.signal_lead, cluster.max_restarts_without_progress) == ("torchrun", 120, 2)


def test_options_and_variables_are_kept_as_typed(load: Load) -> None:
    cluster = load(
        "sbatch: {gres: gpu:h100:8, deadline: 08:00:00, nodelist: 1-4, account: 0123, exclusive: True}\n"
        "srun: {cpu-bind: 0xf}\n"
        "stages: {evaluate: {sbatch: {nice: 1_000}}}\n"
        'env: {A: 0123, B: no, C: True, D: "", E: "a,b\\nc", F: 1e-4, TOKENIZERS_PARALLELISM: false}\n'
        "mem: 0\n"
    )
    assert cluster.sbatch == {
        "gres": "gpu:h100:8", "deadline": "08:00:00", "nodelist": "1-4", "account": "0123", "exclusive": "true",
    }  # fmt: skip
    assert (cluster.srun, cluster.stages.evaluate.sbatch) == ({"cpu-bind": "0xf"}, {"nice": "1_000"})
    assert cluster.env == {
        "A": "0123", "B": "no", "C": "True", "D": "", "E": "a,b\nc", "F": "1e-4", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    assert cluster.mem == "0"


def test_paths_are_filled_in_where_slurm_is_here(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARED", str(tmp_path))
    assert load("state_dir: $SHARED/state").state_dir == f"{tmp_path}/state"
    away = load(
        "state_dir: $SHARED/state\nlogin: {prefix: [ssh, login01], root: /shared/me}\n"
        "python: /shared/env/bin/python\nhost_python: /usr/bin/python3"
    )
    assert away.state_dir == "$SHARED/state"
    assert away.slurm().prefix == ("ssh", "login01")
    in_image = load("image: /shared/x.sqsh\nhost_python: /usr/bin/python3\nlogin: {prefix: ssh, root: /shared/me}")
    assert in_image.python == "/usr/bin/python3"


@pytest.mark.parametrize(
    ("flag", "kind", "option"),
    [
        ("gres", "h100", {"gres": "gpu:h100:4"}),
        ("gres", "", {"gres": "gpu:4"}),
        ("gpus-per-node", "h100", {"gpus-per-node": "h100:4"}),
        ("gpus-per-node", "", {"gpus-per-node": "4"}),
        ("none", "h100", {}),
    ],
)
def test_exactly_one_option_asks_for_gpus(load: Load, flag: str, kind: str, option: dict[str, str]) -> None:
    cluster = load(f"gpus_per_node: 8\ngpu_flag: {flag}\n" + (f"gpu_type: {kind}" if kind else ""))
    assert cluster.sbatch_options("pretrain", gpus=4) == option
    assert cluster.sbatch_options("tokenize") == {}


def test_options_of_the_config_win_over_the_stages_and_those_over_the_clusters(load: Load) -> None:
    cluster = load(
        "sbatch: {partition: gpu, qos: normal, account: us}\nsrun: {mpi: pmix}\n"
        "stages: {evaluate: {sbatch: {partition: cpu, qos: low}, srun: {mpi: none}}}\nmem: 64G\ncpus_per_task: 4"
    )
    section = EvaluateConfig(sbatch={"qos": "lowest"}, srun={"cpu-bind": "none"})
    wanted = {"cpus-per-task": "4", "mem": "64G", "partition": "cpu", "qos": "lowest", "account": "us"}
    assert cluster.sbatch_options("evaluate", section) == wanted
    assert cluster.srun_options("evaluate", section) == {"mpi": "none", "cpu-bind": "none"}
    by_cpu = EvaluateConfig(sbatch={"mem-per-cpu": "2G"})  # Slurm refuses mem beside it
    assert "mem" not in cluster.sbatch_options("evaluate", by_cpu)


def test_a_config_cannot_ask_for_gpus_a_second_time(load: Load) -> None:
    cluster = load("gpus_per_node: 8")
    with pytest.raises(UserError, match=r"pretrain\.sbatch\.gres: two options would ask for GPUs"):
        cluster.sbatch_options("pretrain", PretrainConfig(sbatch={"gres": "gpu:1"}), gpus=8)
    free = load("scheduler: slurm").sbatch_options("pretrain", PretrainConfig(sbatch={"gres": "gpu:1,shard:2"}))
    assert free == {"gres": "gpu:1,shard:2"}


def test_networks_are_profiles_that_env_wins_over(load: Load) -> None:
    assert load("network: tcp").environment()["NCCL_IB_DISABLE"] == "1"
    infiniband = load("network: infiniband\nenv: {NCCL_IB_HCA: =mlx5_1, NCCL_SOCKET_IFNAME: =ib0}").environment()
    assert infiniband["NCCL_IB_DISABLE"] == "0"
    assert infiniband["NCCL_IB_HCA"] == "=mlx5_1"
    assert infiniband["GLOO_SOCKET_IFNAME"] == "ib0"  # Gloo knows no `=`
    assert "GLOO_SOCKET_IFNAME" not in load("network: infiniband").environment()  # nor `^`
    assert load("network: efa").environment()["FI_PROVIDER"] == "efa"
    assert load("nccl_debug: INFO").environment() == {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
    assert load("").environment() == {"NCCL_DEBUG": "WARN"}


# What is refused

MISTAKES = {
    "misspelt": ("schedular: slurm", "schedular: unknown key; did you mean scheduler?"),
    "option of Slurm at the top": ("partition: gpu", "an option of Slurm goes below sbatch:; write there partition"),
    "other's name": ("ssh: login01", "ssh: unknown key; did you mean login?"),
    "misspelt stage": ("stages: {tokenise: {}}", "stages.tokenise: unknown key; did you mean tokenize?"),
    "misspelt in a stage": (
        "stages: {pretrain: {sbtch: {}}}",
        "stages.pretrain.sbtch: unknown key; did you mean sbatch?",
    ),
    "option in a stage": ("stages: {pretrain: {partition: x}}", "goes below sbatch:; write there partition: VALUE"),
    "kind of cluster": ("scheduler: pbs", "'pbs' is not one of local, slurm"),
    "relative Python": ("python: env/bin/python", "'env/bin/python' is not an absolute path"),
    "unset variable": ("host_python: $UNSET_X/python", "uses the variable UNSET_X, which is not set"),
    "name": ("env: {A=B: 1}", "env.A=B: 'A=B' is not the name of a variable"),
    "preload": ("env: {LD_PRELOAD: x}", "would put foreign code into every process"),
    "secret": ("env: {HF_TOKEN: hf_private}", "'HF_TOKEN' looks like a secret"),
    "key": ("env: {WANDB_API_KEY: private}", "'WANDB_API_KEY' looks like a secret"),
    "of Slurm": ("env: {SLURM_MEM_PER_NODE: 1}", "is set by Slurm, the launcher or the plan"),
    "of the launcher": ("env: {MASTER_ADDR: n1}", "is set by Slurm, the launcher or the plan"),
    "nothing": ("env: {X: }", 'env.X: has no value; write one, or "" for an empty one'),
    "NUL": ('env: {X: "a\\0b"}', "holds a NUL character"),
    "list": ("env: {X: [1]}", "env.X: a list where text is needed"),
    "no map": ("env: x", "env: 'x' where names with values are needed; write for example {NCCL_IB_HCA"),
    "image_cache alone": ("image_cache: /local", "image_cache: only the file of an image can be copied and verified"),
    "image_cache of a registry's": ("image: ubuntu:24.04\nimage_cache: /local", "only the file of an image can be"),
    "relative image_cache": ("image: /x.sqsh\nimage_cache: scratch", "'scratch' is not an absolute path"),
    "hostile mount": ("mounts: ['/a/$(id):/b']", """holds '$', which a container's mount cannot"""),
    "memory without unit": ("mem: 64", "mem: '64' is 64 megabytes to Slurm; write 64G, or 64M if that is meant"),
    "memory in GB": ("mem: 64GB", "'64GB' is not an amount of memory; write 64G"),
    "memory with a blank": ("mem: 64 g", "write 64G"),
    "memory": ("mem: much", "'much' is not an amount of memory; write for example 64G, or 0"),
    "typed GPUs": ("gpus_per_node: h100:8", "is type and number in one; write gpus_per_node: 8 and gpu_type: h100"),
    "no GPUs": ("gpus_per_node: 0", "0 is out of range; it must be at least 1"),
    "type alone": ("gpu_type: h100", "nothing says how many; add gpus_per_node"),
    "GPUs twice": ("gpus_per_node: 8\nsbatch: {gres: gpu:8}", "sbatch.gres: two options would ask for GPUs"),
    "GPUs twice in a stage": (
        "gpus_per_node: 8\nstages: {pretrain: {sbatch: {gpus: 8}}}",
        "stages.pretrain.sbatch.gpus: two options would ask for GPUs",
    ),
    "lead": ("signal_lead: 59", "59 is out of range; it must be at least 60"),
    "network": ("network: ib", "'ib' is not one of tcp, infiniband, roce, efa"),
    "local with Slurm's": ("scheduler: local\nsbatch: {qos: x}", "scheduler: local runs without Slurm"),
    "hours": ("confirm_gpu_hours: 9\nmax_gpu_hours: 8", "confirm_gpu_hours 9 is more than max_gpu_hours 8"),
    "login without root": ("login: {prefix: ssh}", "login.root: is missing; write for example `login.root: /shared"),
    "login with a relative root": (
        "login: {prefix: ssh, root: x}",
        "needs an absolute root; 'x' does not begin with /",
    ),
    "login quoting": (
        "login: {prefix: ssh, root: /x, quoting: shell}\npython: /x\nhost_python: /x",
        "'shell' is not one of argv, one-string",
    ),
    "login without Python": (
        "login: {prefix: ssh, root: /x}\npython: /x",
        "host_python: is missing: with login, this machine's interpreter means nothing",
    ),
    "login with a Python at home": (
        "login: {prefix: ssh, root: /x}\npython: ~/env/bin/python\nhost_python: /x",
        "'~/env/bin/python': with login, ~ and variables would be those of this machine",
    ),
    "two clusters": ("cluster: a,b", "is not the name of one cluster"),
    "all clusters": ("cluster: all", "is no single cluster"),
    "a cluster and no Slurm": ("scheduler: local\ncluster: two", "scheduler: local runs without Slurm"),
    "a mark": ("job_mark: wckey", "'wckey' is not one of comment, name"),
    "login without words": ("login: {prefix: [], root: /x}", "is an empty list"),
}
OWNED = (
    "job-name dependency output error parsable comment export array open-mode requeue no-requeue signal "
    "kill-on-invalid-dep chdir wait wrap test-only nodes ntasks ntasks-per-node time time-min clusters container-image"
).split()


@pytest.mark.parametrize(("text", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named_with_line_key_and_advice(refuse: Refuse, text: str, message: str) -> None:
    (mistake,) = refuse(text)
    assert re.match(r"ours\.yaml:\d+: ", mistake)
    assert message in mistake
    assert "private" not in mistake


@pytest.mark.parametrize("option", OWNED)
def test_options_of_the_plan_are_refused_with_what_to_do(refuse: Refuse, option: str) -> None:
    (mistake,) = refuse(f"sbatch:\n  partition: gpu\n  {option}: x")
    assert mistake.startswith(f"ours.yaml:3: sbatch.{option}: '{option}' ")
    assert re.search(r"remove the line|write |use the word|use the verb", mistake)


@pytest.mark.parametrize(
    "option", ["container-image", "container-mounts", "nodes", "ntasks", "cpus-per-task", "export"]
)
def test_options_of_the_plan_are_refused_for_srun(refuse: Refuse, option: str) -> None:
    (mistake,) = refuse(f"srun: {{{option}: x}}")
    assert f"srun.{option}" in mistake


def test_all_mistakes_are_said_at_once_in_the_order_of_the_file(refuse: Refuse) -> None:
    mistakes = refuse("network: ib\nsbatch: {output: x, p: gpu}\nmem: 64\nenv: {A-B: 1, C: }\ngpu_type: x\nfoo: 1\n")
    assert [mistake.split(": ")[1] for mistake in mistakes] == [
        "network", "sbatch.output", "sbatch.p", "mem", "env.A-B", "env.C", "gpu_type", "foo",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"), [("- a", "a list is not a cluster file"), ("", "write at least `scheduler: slurm`")]
)
def test_what_is_no_cluster_file_is_said(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_cluster(path, "/env/bin/python")


def test_which_slurm_is_asked_and_how_its_jobs_are_marked(load: Load) -> None:
    plain = load("scheduler: slurm")
    assert (plain.slurm(), plain.kill_on_invalid_dep) == (Slurm(), True)
    other = load("cluster: two\njob_mark: name\nkill_on_invalid_dep: false")
    assert (other.slurm(), other.kill_on_invalid_dep) == (Slurm(cluster="two", mark="name"), False)


# --cluster


@pytest.fixture
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a scontrol on PATH that finds no controller; return the folder of it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    scontrol(folder, "echo 'Slurmctld(primary) at head is DOWN'; exit 1")
    return folder


def scontrol(folder: Path, answer: str) -> None:
    (folder / "scontrol").write_text(f"#!/bin/sh\n{answer}\n")
    (folder / "scontrol").chmod(0o755)


@pytest.mark.usefixtures("no_slurm")
def test_without_a_name_it_is_this_machine(tmp_path: Path) -> None:
    for name in (None, "local"):
        cluster = open_cluster(name, "/env/bin/python")
        assert (cluster.scheduler, cluster.python) == ("local", "/env/bin/python")
        assert cluster.cores == len(os.sched_getaffinity(0))
    path = tmp_path / "mine.yaml"
    path.write_text("scheduler: local")
    assert open_cluster(str(path), "/env/bin/python").cores == len(os.sched_getaffinity(0))


def test_where_a_slurm_answers_a_name_is_asked_for(no_slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol(no_slurm, "echo 'Slurmctld(primary) at head is UP'")
    monkeypatch.setattr(sys, "argv", ["pipeline", "submit", "my config.yaml"])
    with pytest.raises(UserError) as error:
        open_cluster(None, "/env/bin/python")
    text = str(error.value)
    assert "-m pipeline init --cluster cluster.yaml\n" in text
    assert "-m pipeline submit 'my config.yaml' --cluster cluster.yaml\n" in text
    assert text.endswith("-m pipeline submit 'my config.yaml' --cluster local")
    assert open_cluster("local", "/env/bin/python").scheduler == "local"


@pytest.mark.parametrize("answer", ["sleep 60", "exit 1", "echo nonsense"])
def test_a_slurm_that_does_not_answer_is_none(no_slurm: Path, answer: str) -> None:
    scontrol(no_slurm, answer)
    assert open_cluster(None, "/env/bin/python").scheduler == "local"


def test_a_file_that_is_not_there_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file; to have one written: .* init --cluster .*--cluster local"):
        open_cluster(str(tmp_path / "ours.yaml"), "/env/bin/python")


# The whole surface


def all_keys() -> Iterator[str]:
    for name, field in Cluster.model_fields.items():
        section = section_in(field.annotation)
        yield from [name] if section is None else (f"{name}.{key}" for key in section.model_fields)


@pytest.mark.parametrize("key", [*all_keys(), "stages", "login", "stages.pretrain.sbatch"])
def test_every_key_survives_every_kind_of_value(load: Load, key: str) -> None:
    for value in WILD:
        text = value
        for name in reversed(key.split(".")):
            text = f"{{{name}: {text}}}"
        try:
            load(text)
        except ConfigError as error:
            assert not PYDANTIC_WORDS.search(str(error)), str(error)
            assert "not possible here" not in str(error), str(error)


def test_every_error_of_pydantic_has_words_of_ours() -> None:
    possible: set[Any] = set(possible_errors(Cluster.__pydantic_core_schema__))
    assert possible <= {*WORDS, "extra_forbidden"}


def test_suggestions_name_keys_that_exist() -> None:
    assert set(OTHER_NAMES.values()) <= {*Cluster.model_fields}
    assert set(Options.model_fields) == {"sbatch", "srun"}
