"""The bash of a job script under Slurm: what it asks of the host, what it does with each answer, and with none.

Each script runs with a PATH on which no command of Slurm's is but srun, unless a test puts one there.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from micro import PROJECT

from pipeline.run.folder import Run

TOOLS = "bash sh cat date env grep mkdir printenv sleep timeout touch".split()
# Notes what it is asked and answers with the code in answers/VERB; answers/VERB.sh is run first.
HOST = """\
#!/bin/bash
shift 2
cd {folder}
echo "$*" >> host.calls
printenv PIPELINE_NODES PIPELINE_BATCH_NODE MASTER_ADDR MASTER_PORT > seen.$1
if [[ -e answers/$1.sh ]]; then source answers/$1.sh; fi
if [[ -e answers/$1 ]]; then exit "$(<answers/$1)"; fi
exit 0
"""
SRUN = '#!/bin/bash\ncd {folder}\necho "$*" >> srun.calls\nprintenv > seen.srun\nif [[ -e srun.sh ]]; then source srun.sh; fi\n'


class Script:
    """pretrain.sbatch of a Run, with a host whose answers a test gives."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.bin = folder, Run(folder / "runs" / "mine"), folder / "bin"
        self.bin.mkdir()
        (folder / "answers").mkdir()
        for name in TOOLS:
            (self.bin / name).symlink_to(shutil.which(name) or pytest.fail(f"no {name}"))
        self.command("python", HOST)
        self.command("srun", SRUN)
        shutil.copytree(PROJECT / "sbatch", self.run.snapshot / "sbatch")
        self.launch()

    def launch(self, *lines: str) -> None:
        path = self.run.launch("pretrain")
        path.parent.mkdir(exist_ok=True)
        own = [f"PYTHON={self.bin}/python", "SCHEDULER=slurm", "PREFLIGHT=()", "LAUNCH=(srun --nodes=1 python -u)"]
        path.write_text("\n".join([*own, *lines]) + "\n")

    def command(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text.format(folder=self.folder))
        (self.bin / name).chmod(0o755)

    def answers(self, verb: str, code: int, script: str = "") -> None:
        (self.folder / "answers" / verb).write_text(str(code))
        (self.folder / "answers" / f"{verb}.sh").write_text(script)

    def environment(self, **changes: str) -> dict[str, str]:
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "n1"}
        return {"PATH": str(self.bin), "PIPELINE_HOST_SECONDS": "20"} | slurm | changes

    def words(self, run: str = "") -> list[str]:
        return ["bash", str(self.run.snapshot / "sbatch" / "pretrain.sbatch"), run or str(self.run.root)]

    def __call__(self, run: str = "", **changes: str) -> int:
        done = subprocess.run(
            self.words(run), env=self.environment(**changes), cwd=self.folder, timeout=60, check=False,
            capture_output=True, text=True,
        )  # fmt: skip
        self.said = done.stderr + done.stdout
        return done.returncode

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in self.run.logs.glob("*.log"))

    def calls(self, name: str = "host") -> list[str]:
        path = self.folder / f"{name}.calls"
        return (
            [line.replace(str(self.run.root), "RUN") for line in path.read_text().splitlines()] if path.exists() else []
        )

    @property
    def asked(self) -> list[str]:
        return [line.split()[0] for line in self.calls()]

    def seen(self, by: str) -> dict[str, str]:
        text = (self.folder / f"seen.{by}").read_text()
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def allocation(self, nodes: str) -> None:
        path = self.run.allocation("7", 0)
        self.answers("begin", 0, f"mkdir -p {path.parent}; echo PIPELINE_NODES={nodes} > {path}")


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def test_a_node_needs_no_command_of_slurms_but_srun(script: Script) -> None:
    script.allocation("n1,n2")
    assert script(SLURM_JOB_NODELIST="n[1-2]", SLURM_JOB_NUM_NODES="2") == 0, script.log
    assert script.asked == ["begin", "end"]
    assert script.calls()[1] == "end RUN pretrain 7 0 0 slurm"
    seen = script.seen("srun")
    assert (seen["PIPELINE_NODES"], seen["PIPELINE_BATCH_NODE"], seen["MASTER_ADDR"]) == ("n1,n2", "n1", "n1")
    assert "not found" not in script.log


def test_the_one_node_of_a_job_is_known_without_the_hosts_word(script: Script) -> None:
    assert script() == 0
    assert script.seen("srun")["PIPELINE_NODES"] == "n1"
    assert script(SLURMD_NODENAME="", HOSTNAME="elsewhere") == 0
    assert script.seen("srun")["MASTER_ADDR"] == "elsewhere"


def test_all_job_scripts_leave_a_blind_node_in_the_same_words() -> None:
    """Slurm copies each script alone to the node, so none can read these lines from a file."""
    assert len({blind_node(script.read_text()) for script in (PROJECT / "sbatch").glob("*.sbatch")}) == 1


def blind_node(text: str) -> str:
    """Return what a job script does where it does not see the Run."""
    return text[text.index("\nlib=") : text.index("\nrun=$(CDPATH")] if "\nlib=" in text else ""


def test_no_other_script_says_scontrol_or_sinfo() -> None:
    for path in (PROJECT / "sbatch").iterdir():
        text = path.read_text()
        text = text.replace(blind_node(text), "")
        code = [line.split(" #")[0] for line in text.splitlines() if not line.startswith("#")]
        found = [line for line in code for word in ("scontrol ", "sinfo ", "squeue ", "scancel ") if word in line]
        assert path.name == "lib.sh" or not found, f"{path.name}: {found}"


@pytest.mark.parametrize(("answer", "code"), [(100, 0), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (75, 75)])
def test_what_begin_decides_is_the_end_of_it(script: Script, answer: int, code: int) -> None:
    script.answers("begin", answer)
    assert script() == code
    assert script.asked == ["begin"]


@pytest.mark.parametrize("death", ["exit 1", "kill -9 $$", "exit 126", "sleep 30"])
def test_a_begin_that_dies_or_hangs_is_rescued(script: Script, death: str) -> None:
    script.answers("begin", 0, death)
    assert script(PIPELINE_HOST_SECONDS="1" if "sleep" in death else "20") == 0
    assert script.asked == ["begin", "rescue"]
    code = {"exit 1": 1, "kill -9 $$": 137, "exit 126": 126, "sleep 30": 137}[death]
    assert script.calls()[1] == f"rescue RUN pretrain 7 0 {code}"


def test_an_interpreter_that_is_not_there_is_no_verdict(script: Script) -> None:
    script.launch("PYTHON=/no/python", "MAY_SUBMIT=1")
    slurm_knows(script, restarts=0)
    assert script() == 127
    assert script.calls("scontrol")[-1] == "requeue 7"


@pytest.mark.parametrize("fault", ["step() { false; }", "unset -f step", "finish() { exit 0; }"])
def test_an_error_of_the_script_itself_is_rescued(script: Script, fault: str) -> None:
    lib = script.run.snapshot / "sbatch" / "lib.sh"
    lib.write_text(lib.read_text() + fault + "\n")
    assert script() == 0
    assert script.asked == ["begin", "rescue"]


def test_a_folder_that_cannot_be_written_is_rescued(script: Script) -> None:
    script.run.control.write_text("a file")
    assert script() == 0
    assert script.asked == ["rescue"]
    script.run.control.unlink()
    shutil.rmtree(script.run.logs, ignore_errors=True)
    script.run.log("pretrain", "7", 0).mkdir(parents=True)
    assert script() == 0
    assert script.asked == ["rescue"] * 2


def test_rescue_decides_the_exit_code(script: Script) -> None:
    script.answers("begin", 1)
    script.answers("rescue", 4)
    assert script() == 4


@pytest.mark.parametrize(("answer", "settled", "code"), [(1, True, 1), (1, False, 0), (137, True, 0), (5, False, 5)])
def test_an_end_that_dies_before_its_verdict_is_rescued(script: Script, answer: int, settled: bool, code: int) -> None:
    folder = script.run.allocation("7", 0).parent
    script.answers("end", answer, f"mkdir -p {folder}; touch {folder}/verdict.json" if settled else "")
    assert script() == code
    assert script.asked == ["begin", "end"] + ["rescue"] * (code == 0)


def slurm_knows(script: Script, restarts: int) -> None:
    answer = f"JobId=7 JobName=x Restarts={restarts} BatchFlag=1"
    script.command("scontrol", '#!/bin/bash\necho "$*" >> {folder}/scontrol.calls\necho "' + answer + '"\n')


@pytest.mark.parametrize(
    ("attempt", "restarts", "requeued"), [(0, 0, True), (2, 2, True), (3, 3, False), (0, 1, False)]
)  # fmt: skip
def test_the_last_resort_is_to_queue_again_a_few_times(
    script: Script, attempt: int, restarts: int, requeued: bool
) -> None:
    script.launch("MAY_SUBMIT=1")
    slurm_knows(script, restarts)
    script.answers("begin", 1)
    script.answers("rescue", 1)
    assert script(SLURM_RESTART_COUNT=str(attempt)) == 1
    assert ("requeue 7" in script.calls("scontrol")) == requeued


def test_the_last_resort_is_left_where_nodes_may_not_submit_or_scontrol_hangs(script: Script) -> None:
    slurm_knows(script, 0)
    script.answers("begin", 1)
    script.answers("rescue", 1)
    assert script() == 1
    assert script.calls("scontrol") == []
    (script.bin / "scontrol").unlink()
    script.launch("MAY_SUBMIT=1")
    assert script() == 1


def started(script: Script, verb: str) -> Iterator[None]:
    deadline = time.monotonic() + 30
    while verb not in script.asked:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        yield


@pytest.mark.parametrize("verb", ["end", "rescue"])
def test_a_signal_does_not_cut_the_last_words_short(script: Script, verb: str) -> None:
    script.answers("begin", 0 if verb == "end" else 1)
    script.answers(verb, 4, "trap -p TERM > trapped; sleep 1")
    process = subprocess.Popen(script.words(), env=script.environment(), cwd=script.folder)
    for _ in started(script, verb):
        assert process.poll() is None
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        os.kill(process.pid, number)
    assert process.wait(30) == 4
    assert "''" in (script.folder / "trapped").read_text()  # nor those of its children


def test_a_run_is_the_one_that_is_named_whatever_cdpath_says(script: Script) -> None:
    other = script.folder / "other" / "runs" / "mine"
    (other / "launch").mkdir(parents=True)
    (other / "launch" / "pretrain.env").write_text("echo the other Run; exit 9\n")
    assert script("runs/mine", CDPATH=str(script.folder / "other")) == 0, script.said
    assert script.calls()[0] == "begin RUN pretrain 7 0"


@pytest.mark.parametrize("address", ["127.0.0.9", "0.0.0.0", "::1"])
def test_a_port_on_which_someone_listens_is_passed_over(script: Script, address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if ":" in address and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with socket.socket(family) as listener:
        for job in range(7, 500):
            try:
                listener.bind((address, 20000 + job))
                break
            except OSError:
                continue
        listener.listen()
        assert script(SLURM_JOB_ID=str(job)) == 0
        assert int(script.seen("srun")["MASTER_PORT"]) > 20000 + job


def test_a_node_without_a_free_port_ends_the_script_and_not_in_a_loop(script: Script) -> None:
    (script.bin / "grep").unlink()
    script.command("grep", "#!/bin/sh\nexit 0\n")  # every port is taken
    (script.run.snapshot / "sbatch" / "lib.sh").write_text(
        (PROJECT / "sbatch" / "lib.sh").read_text().replace("PORTS=1000 ", "PORTS=20 ")
    )
    script.answers("rescue", 3)
    assert script() == 3
    assert "none of 20 ports from 20000 to 29999 is free on n1" in script.log
    assert script.asked == ["begin", "rescue"]
    assert not script.calls("srun")


def test_what_becomes_srun_alone_has_the_secrets(script: Script) -> None:
    script.command("secrets", '#!/bin/bash\nTOKEN=canary exec "$@"\n')
    script.command("python", HOST.replace("printenv PIPELINE_NODES", "printenv TOKEN PIPELINE_NODES"))
    script.launch(f"SECRETS=({script.bin}/secrets)")
    assert script() == 0, script.log
    assert script.seen("srun")["TOKEN"] == "canary"
    assert script.calls("srun") == ["--nodes=1 python -u -m pipeline.stages.pretrain RUN"]
    for verb in ("begin", "end"):
        assert "canary" not in (script.folder / f"seen.{verb}").read_text()


def test_by_hand_it_says_that_slurm_is_wanted(script: Script) -> None:
    environment = {name: value for name, value in script.environment().items() if not name.startswith("SLURM")}
    done = subprocess.run(script.words(), env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode != 0
    assert "use sbatch, not bash" in done.stderr


RANK = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
BATCH = {"PIPELINE_BATCH_NODE": "n1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"SLURM_LAUNCH_NODE_IPADDR": "10.1.0.7"}, "10.1.0.7"),  # whatever n1 resolves to here
        ({"SLURM_LAUNCH_NODE_IPADDR": "fd00::7"}, "fd00::7"),
        ({"SLURM_LAUNCH_NODE_IPADDR": "127.0.1.1"}, "n1"),  # the batch node itself
        ({"SLURM_LAUNCH_NODE_IPADDR": "::1"}, "n1"),
        ({}, "n1"),
        ({"SLURM_LAUNCH_NODE_IPADDR": "10.1.0.9", "PIPELINE_BATCH_NODE": "n9"}, "n1"),  # sbatch --batch chose another
    ],
)
def test_rank_0_is_found_by_the_address_that_sruns_call_came_from(changes: dict[str, str], found: str) -> None:
    environment = {"PATH": os.environ["PATH"]} | RANK | BATCH | changes
    for words in (["rank.sh", "printenv", "MASTER_ADDR"], ["node.sh", "echo", "--", "x"]):
        done = subprocess.run(
            ["bash", str(PROJECT / "sbatch" / words[0]), *words[1:]],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert found in done.stdout.replace("=", " ").split(), done.stdout


def test_beside_training_it_is_looked_after_that_another_job_waits(script: Script) -> None:
    script.launch("MAY_SUBMIT=1")
    (script.folder / "srun.sh").write_text(
        "for i in {1..200}; do grep -qs ^tend host.calls && exit; sleep 0.1; done; exit 1"
    )
    assert script(PIPELINE_TEND_SECONDS="0", PIPELINE_WATCH_SECONDS="0.2") == 0, script.log
    assert "tend RUN 7 0" in script.calls()
