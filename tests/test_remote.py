"""Runs elsewhere: a laptop without Slurm, and a "login node" that only one command reaches: here a script around `sh -c`.

Over there is a small Slurm, and a folder whose name would break every careless quotation.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fake_slurm
import pytest
from micro import environment

from pipeline.cluster.load import load_cluster
from pipeline.cluster.remote import _with_terminal
from pipeline.files import read_json, write_text
from pipeline.run.folder import Run

Pipeline = Callable[..., subprocess.CompletedProcess[str]]

HOSTILE = 'it\'s "$(touch hacked)"; `touch hacked` & x'
CLUSTER = """\
scheduler: slurm
python: {python}
host_python: {python}
sbatch: {{partition: gpu, qos: "a'b $(touch hacked); c"}}
login:
  prefix: [{prefix}]
  quoting: {quoting}
  root: {root}
"""
PREFIX = """\
#!/bin/sh
# Reaches the login node: its home folder and PATH are other ones.
printf 'call\\n' >> {folder}/calls
cd {folder}/home || exit
export HOME={folder}/home PATH={path} FAKE_SLURM={slurm}
unset PYTHONPATH
{do}
"""
DO = {"one-string": 'exec sh -c "$1"', "two-strings": 'exec sh -c "exec sh -c $1"', "argv": 'exec "$@"'}


class Laptop:
    """A machine without Slurm, and the folder `there` on the other one that its Runs are in."""

    def __init__(self, tmp_path: Path, micro: Path, pipeline: Pipeline, quoting: str = "one-string") -> None:
        self.folder, self.micro, self.pipeline = tmp_path, micro, pipeline
        self.slurm, self.there = tmp_path / "slurm", tmp_path / HOSTILE
        (tmp_path / "home").mkdir()
        path = fake_slurm.install(self.slurm)["PATH"]
        prefix = tmp_path / "reach"
        prefix.write_text(PREFIX.format(folder=tmp_path, path=path, slurm=self.slurm, do=DO[quoting]))
        prefix.chmod(0o755)
        self.cluster = tmp_path / "far.yaml"
        self.cluster.write_text(
            CLUSTER.format(python=sys.executable, prefix=prefix, quoting=quoting, root=json.dumps(str(self.there)))
        )
        self.here, self.run = Run(tmp_path / "runs" / "micro"), Run(self.there / "micro")

    def submit(self, *words: object) -> subprocess.CompletedProcess[str]:
        return self.pipeline("submit", self.micro, "--cluster", self.cluster, *words)

    def verb(self, *words: object) -> subprocess.CompletedProcess[str]:
        return self.pipeline(*words)

    @property
    def queue(self) -> dict[str, dict]:
        return fake_slurm.read(self.slurm)

    def set(self, stage: str, state: str, **changes: object) -> None:
        (job_id,) = [job_id for job_id, job in self.queue.items() if job["name"].startswith(f"micro-{stage}-")]
        fake_slurm.set_state(self.slurm, job_id, state, **changes)

    def calls(self) -> int:
        """Return how often the other machine was called since the last time."""
        path = self.folder / "calls"
        number = len(path.read_text().splitlines()) if path.exists() else 0
        path.unlink(missing_ok=True)
        return number


@pytest.fixture(params=DO)
def both(tmp_path: Path, micro: Path, pipeline: Pipeline, request: pytest.FixtureRequest) -> Laptop:
    return Laptop(tmp_path, micro, pipeline, request.param)


@pytest.fixture
def laptop(tmp_path: Path, micro: Path, pipeline: Pipeline) -> Laptop:
    return Laptop(tmp_path, micro, pipeline)


def test_a_chain_is_submitted_elsewhere_by_one_call_and_is_a_run_like_any_other_there(both: Laptop) -> None:
    result = both.submit()
    assert result.returncode == 0, result.stderr
    assert both.calls() == 2  # a look at the data, and the submission
    id_ = read_json(both.run.record)["id"]
    assert [job["name"] for job in both.queue.values()] == [
        f"micro-{stage}-{id_}" for stage in ("tokenize", "pretrain", "evaluate", "inference")
    ]
    words = both.queue["102"]["words"]
    assert {"--partition=gpu", "--qos=a'b $(touch hacked); c", f"--chdir={both.run.root}"} <= set(words)
    assert words[-2:] == [str(both.run.snapshot / "sbatch" / "pretrain.sbatch"), str(both.run.root)]
    assert "login: null" in both.run.cluster.read_text()
    assert read_json(both.run.record)["code"]
    assert not list(both.folder.rglob("hacked"))
    assert sorted(path.name for path in both.here.root.iterdir()) == ["cluster.yaml", "config.yaml"]
    assert f"-m pipeline logs -f {os.path.relpath(both.here.root, both.folder)}" in result.stderr


def test_init_finds_out_how_the_prefix_wants_its_words(both: Laptop) -> None:
    (both.slurm / "sinfo.answer").write_text("gpu*|up|1-00:00:00|16|128|2000000|gpu:h100:8\n")
    (both.slurm / "scontrol.answer").write_text("ClusterName = far\nSLURM_VERSION = 23.11.4\n")
    made = both.pipeline("init", "--cluster", "new.yaml", "--login", f"{both.folder}/reach")
    assert made.returncode == 0, made.stderr
    written = load_cluster(both.folder / "new.yaml", "/no/python")
    assert written.login == load_cluster(both.cluster, "/no/python").login.model_copy(
        update={"root": f"{both.folder}/home/runs"}
    )
    assert (written.python, written.gpus_per_node) == (f"{both.folder}/home/env/bin/python", 8)


def test_init_by_a_prefix_that_spoils_words_says_what_came_back(laptop: Laptop) -> None:
    (laptop.folder / "reach").write_text("#!/bin/sh\necho Welcome to login01\n")
    refused = laptop.pipeline("init", "--cluster", "new.yaml", "--login", f"{laptop.folder}/reach")
    assert refused.returncode == 3
    assert "one-string: Welcome to login01" in refused.stderr
    assert not (laptop.folder / "new.yaml").exists()


def test_the_launch_file_is_bash_whatever_the_folder_is_called(laptop: Laptop) -> None:
    laptop.submit()
    script = 'source "$1"; printf "%s\\n" "$PYTHONPATH"'
    said = subprocess.run(
        ["bash", "-ec", script, "bash", laptop.run.launch("pretrain")],
        capture_output=True, text=True, check=True, cwd=laptop.folder, env=environment(SLURM_CPUS_PER_TASK="1"),
    )  # fmt: skip
    assert said.stdout == f"{laptop.run.snapshot}\n"
    assert not list(laptop.folder.rglob("hacked"))


def test_nothing_is_left_of_what_was_brought(laptop: Laptop) -> None:
    laptop.submit()
    laptop.submit("--dry-run")
    left = {path.name for path in laptop.run.root.iterdir()} | {path.name for path in laptop.there.iterdir()}
    assert not [name for name in left if name.startswith(".")]
    assert not (laptop.run.root / "code.json").exists()


def test_a_second_submit_adopts_and_so_does_one_after_a_lost_connection(laptop: Laptop) -> None:
    (laptop.slurm / "die_after").write_text("2")
    assert laptop.submit().returncode != 0
    assert len(laptop.queue) == 2
    (laptop.slurm / "die_after").unlink()
    assert laptop.submit().returncode == 0
    again = laptop.submit()
    assert "pending already" in again.stderr
    assert len(laptop.queue) == 4


def test_status_is_one_call_and_says_what_is_true_there(laptop: Laptop) -> None:
    laptop.submit()
    laptop.set("tokenize", "RUNNING", nodes="n1")
    laptop.calls()
    found = json.loads(laptop.verb("status", laptop.here.root, "--json").stdout)
    assert laptop.calls() == 1
    assert (found["state"], found["run"]) == ("running", str(laptop.run.root))
    shown = laptop.verb("status", laptop.here.root).stdout
    assert f"-m pipeline stop {os.path.relpath(laptop.here.root, laptop.folder)}" in shown
    for stage in ("evaluate", "inference"):  # they begin when pretrain is cancelled, find no model, and leave
        laptop.set(stage, "COMPLETED")
    laptop.set("tokenize", "FAILED")
    assert laptop.verb("status", laptop.here.root).returncode == 1


def test_stop_save_cancel_and_resume_reach_the_run(laptop: Laptop) -> None:
    laptop.submit()
    assert laptop.verb("save", laptop.here.root).returncode == 3  # nothing trains yet
    laptop.set("tokenize", "RUNNING")
    laptop.verb("save", laptop.here.root)
    assert laptop.run.save.is_file()
    stopped = laptop.verb("stop", laptop.here.root)
    assert stopped.returncode == 0, stopped.stderr
    assert laptop.run.stop.is_file()
    assert [job["state"] for job in laptop.queue.values()] == ["RUNNING", "CANCELLED", "CANCELLED", "CANCELLED"]
    laptop.verb("cancel", laptop.here.root)
    assert {job["state"] for job in laptop.queue.values()} == {"CANCELLED"}
    resumed = laptop.verb("resume", laptop.here.root, "pretrain.max_steps=40")
    assert resumed.returncode == 0, resumed.stderr
    assert not laptop.run.stop.exists()
    assert [job["state"] for job in laptop.queue.values()].count("PENDING") == 4
    assert "max_steps: 40" in laptop.run.config.read_text()


def test_what_another_machine_has_changed_is_not_undone(laptop: Laptop) -> None:
    laptop.submit()
    laptop.run.config.write_text(laptop.run.config.read_text().replace("max_steps: 20", "max_steps: 60"))
    assert laptop.verb("resume", laptop.here.root).returncode == 0
    assert "max_steps: 60" in laptop.run.config.read_text()


def test_logs_are_those_over_there_and_following_ends_with_the_reader(laptop: Laptop) -> None:
    laptop.submit()
    write_text(laptop.run.log("tokenize", "101", 0), "reading\n")
    assert laptop.verb("logs", laptop.here.root).stdout == "reading\n"
    laptop.set("tokenize", "RUNNING")
    words = [sys.executable, "-m", "pipeline", "logs", "-f", str(laptop.here.root)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment(), cwd=laptop.folder) as follower:
        assert follower.stdout
        assert follower.stdout.readline() == "reading\n"
        with laptop.run.log("tokenize", "101", 0).open("a") as file:
            file.write("and more\n")
        assert follower.stdout.readline() == "and more\n"
        follower.send_signal(signal.SIGKILL)  # as a laptop that is closed
    wait_until(lambda: not following(laptop), "the end of `logs -f` over there")


def following(laptop: Laptop) -> list[str]:
    """List the processes over there that follow this Run's logs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "--follow" in words and str(laptop.run.root) in words:
            found.append(path.parent.name)
    return found


def wait_until(condition: Callable[[], object], what: str, timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout:.0f} s for {what}"
        time.sleep(0.1)


def test_the_report_is_brought_here(laptop: Laptop) -> None:
    laptop.submit()
    made = laptop.verb("report", laptop.here.root)
    assert made.returncode == 0, made.stderr
    assert made.stdout.strip() == str(laptop.here.report)
    assert laptop.here.report.read_text() == laptop.run.report.read_text()


def test_plan_and_test_leave_no_trace(laptop: Laptop) -> None:
    dry = laptop.submit("--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert f"--chdir={laptop.run.root}" in dry.stdout.replace("'\"'\"'", "'")
    plan = json.loads(laptop.pipeline("plan", laptop.micro, "--cluster", laptop.cluster, "--json").stdout)
    assert plan["run"] == str(laptop.run.root)
    tested = laptop.submit("--test")
    assert tested.stdout.count("to start at") == 4
    assert not laptop.there.exists()
    assert not laptop.here.root.exists()
    assert laptop.queue == {}


MISTAKES = {
    "relative": ("data=corpus", "is read on the cluster, where this machine's folders and variables mean nothing"),
    "home": ("data=~/corpus", "is read on the cluster"),
    "variable": ("data=/data/$USER", "is read on the cluster"),
    "absent": ("data=/nowhere/x/*.txt", "is not there on the cluster; copy it there, or mend the path"),
    "no file": ("tokenize.tokenizer=/usr", "is a folder on the cluster, and a file is needed"),
    "hub": ("data={path: hf:a/b}", "is a dataset, not a path"),
}


@pytest.mark.parametrize(("override", "message"), MISTAKES.values(), ids=MISTAKES)
def test_paths_are_looked_for_where_they_are_read(laptop: Laptop, override: str, message: str) -> None:
    refused = laptop.submit(override)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert f"override '{override}'" in refused.stderr
    assert not laptop.there.exists()


def test_an_interpreter_of_this_machine_is_no_default(laptop: Laptop) -> None:
    laptop.cluster.write_text(f"login: {{prefix: x, root: /x}}\npython: {sys.executable}\n")
    refused = laptop.submit()
    assert refused.returncode == 2
    assert "far.yaml:1: host_python: is missing: with login" in refused.stderr
    laptop.cluster.write_text("login: {prefix: x, root: /x}\npython: ~/env/bin/python\nhost_python: /x\n")
    assert "write the whole path" in laptop.submit().stderr


def test_an_interpreter_that_lacks_packages_is_named_with_what_to_do(laptop: Laptop) -> None:
    python = laptop.folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    python.chmod(0o755)
    laptop.cluster.write_text(
        laptop.cluster.read_text().replace(f"host_python: {sys.executable}", f"host_python: {python}")
    )
    refused = laptop.submit()
    assert refused.returncode == 3
    assert "No module named" in refused.stderr
    assert "pip install pydantic pyyaml rich typer" in refused.stderr
    assert laptop.queue == {}


def test_no_connection_is_said_and_harms_nothing(laptop: Laptop) -> None:
    laptop.submit()
    (laptop.folder / "reach").write_text("#!/bin/sh\necho 'ssh: connect to host login01: timed out' >&2; exit 255\n")
    lost = laptop.verb("status", laptop.here.root)
    assert lost.returncode == 3
    assert "timed out" in lost.stderr
    assert "no connection" in lost.stderr
    assert "Traceback" not in lost.stderr
    (laptop.folder / "reach").unlink()
    assert "no such command here; mend login.prefix" in laptop.verb("status", laptop.here.root).stderr


def test_a_run_of_the_same_name_on_this_machine_is_not_taken_for_a_pointer(laptop: Laptop) -> None:
    laptop.here.root.mkdir(parents=True)
    laptop.here.config.write_text(laptop.micro.read_text())
    refused = laptop.submit()
    assert refused.returncode == 2
    assert "a Run of this name is on this machine; take another name" in refused.stderr
    assert laptop.queue == {}


def test_a_run_that_was_refused_over_there_is_not_there(laptop: Laptop) -> None:
    laptop.cluster.write_text(laptop.cluster.read_text() + "gpus_per_node: 8\nconfirm_gpu_hours: 1\n")
    laptop.submit("pretrain.time=10:00:00")
    missing = laptop.verb("status", laptop.here.root)
    assert missing.returncode == 3
    assert "no Run over there (yet)" in missing.stderr


def test_doctor_looks_at_the_other_machine(laptop: Laptop) -> None:
    laptop.cluster.write_text(laptop.cluster.read_text().replace(f"python: {sys.executable}", "python: /no/python", 1))
    checks = json.loads(laptop.pipeline("doctor", laptop.micro, "--cluster", laptop.cluster, "--json").stdout)["checks"]
    found = {check["name"]: (check["state"], check["found"]) for check in checks}
    assert found["python"][0] == "fail"
    assert found["host_python"][0] == "ok"
    assert str(laptop.there) in found["login.root"][1]


def test_cost_is_asked_for_over_there(laptop: Laptop) -> None:
    laptop.cluster.write_text(laptop.cluster.read_text() + "gpus_per_node: 8\nconfirm_gpu_hours: 1\n")
    refused = laptop.submit("pretrain.time=10:00:00")
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert laptop.submit("pretrain.time=10:00:00", "--yes").returncode == 0


def test_shell_asks_for_a_terminal_over_there(laptop: Laptop) -> None:
    laptop.submit()
    ssh = laptop.folder / "ssh"
    ssh.write_text('#!/bin/sh\necho "$1|$2|$3"\n')
    ssh.chmod(0o755)
    text = laptop.here.cluster.read_text()
    laptop.here.cluster.write_text(
        text.replace(str(laptop.folder / "reach"), f"{ssh}\n    - login01").replace(
            "prefix:\n    - ", "prefix:\n    - "
        )
    )
    said = laptop.verb("shell", laptop.here.root, "--time", "30").stdout
    assert said.startswith("-t|login01|env ")
    gate, through = ["/usr/bin/ssh", "gate", "ssh", "login01"], ["kubectl", "exec", "-i", "pod", "--"]
    assert _with_terminal(gate) == ["/usr/bin/ssh", "-t", "gate", "ssh", "-t", "login01"]
    assert _with_terminal(through) == ["kubectl", "exec", "-t", "-i", "pod", "--"]
    assert "--time=30" in said
