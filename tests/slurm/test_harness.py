"""Slurm's own rules, seen on bare job scripts: what the product builds on, and what the private Slurm must do for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from private_slurm import PrivateSlurm, clean_environment
from slurm_packages import reason
from slurm_processes import SlurmError, wait_until

Note = Callable[[str], None]
HARNESS = Path(__file__).with_name("private_slurm.py")


def wait_for_text(path: Path, text: str, timeout: float = 30) -> None:
    wait_until(f"{text!r} in {path.name}", lambda: path.exists() and text in path.read_text(), timeout)


def test_a_job_runs_on_nodes_with_names_of_their_own(slurm: PrivateSlurm, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = """
        echo "shell on $(hostname)"
        srun bash -c 'echo "rank $SLURM_PROCID on $(hostname), n3 is $(getent hosts n3 | cut -d" " -f1)"'
    """
    job = slurm.submit(script, "--nodes=2", f"--output={log}")
    assert slurm.wait_for(job, "COMPLETED")["ExitCode"] == "0:0"
    assert log.read_text().splitlines()[0] == "shell on n1"
    assert sorted(log.read_text().splitlines()[1:]) == [
        "rank 0 on n1, n3 is 127.0.0.13",
        "rank 1 on n2, n3 is 127.0.0.13",
    ]


def test_a_finished_job_is_written_down_without_a_database(slurm: PrivateSlurm) -> None:
    job = slurm.submit("exit 3", "--output=/dev/null")
    assert slurm.wait_for(job, "FAILED")["ExitCode"] == "3:0"
    records = slurm.root / "jobcomp.log"
    wait_until("the job's record", lambda: f"JobId={job} " in records.read_text(), 10)
    assert re.search(rf"JobId={job} .*JobState=FAILED", records.read_text())


def test_a_requeue_starts_the_script_again_and_appends_to_its_log(
    slurm: PrivateSlurm, tmp_path: Path, note: Note
) -> None:
    log = tmp_path / "log"
    script = """
        echo "attempt ${SLURM_RESTART_COUNT-unset} at $(date +%s.%N)"
        [[ -n ${SLURM_RESTART_COUNT-} ]] || sleep 300
    """
    job = slurm.submit(script, "--requeue", "--open-mode=append", f"--output={log}")
    wait_for_text(log, "attempt unset")
    asked = time.time()
    slurm.run("scontrol", "requeue", job)
    assert slurm.job(job)["JobState"] in ("COMPLETING", "PENDING")
    known = slurm.wait_for(job, "COMPLETED", timeout=60)
    assert known["Restarts"] == "1"
    first, second = re.findall(r"attempt (\w+) at ([\d.]+)", log.read_text())
    assert (first[0], second[0]) == ("unset", "1")
    note(f"the script ran again {float(second[1]) - asked:.1f} s after scontrol requeue (cred_expire=5)")


def test_without_append_a_requeue_loses_the_log(slurm: PrivateSlurm, tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = slurm.submit(
        'echo "attempt ${SLURM_RESTART_COUNT-unset}"; [[ -n ${SLURM_RESTART_COUNT-} ]] || sleep 300', f"--output={log}"
    )
    wait_for_text(log, "attempt unset")
    slurm.run("scontrol", "requeue", job)
    slurm.wait_for(job, "COMPLETED", timeout=60)
    assert log.read_text() == "attempt 1\n"


def test_a_job_requeues_itself_and_avoids_its_node(slurm: PrivateSlurm, tmp_path: Path) -> None:
    # Refused while the job runs, the list of nodes to avoid is taken in the trap: a requeue sends TERM at once.
    script = """
        echo "on $(hostname)"
        [[ -n ${SLURM_RESTART_COUNT-} ]] && exit 0
        avoid() { scontrol update "jobid=$SLURM_JOB_ID" "excnodelist=$(hostname)" && echo "$1 avoided"; }
        trap 'avoid later; exit 1' TERM
        avoid at-once || echo refused
        scontrol requeue "$SLURM_JOB_ID" & sleep 300 & wait; wait
    """
    job = slurm.submit(script, "--requeue", "--open-mode=append", "--nodes=1", f"--output={tmp_path}/log")
    child = slurm.submit("true", f"--dependency=afterok:{job}", "--kill-on-invalid-dep=yes", "--output=/dev/null")
    slurm.wait_for(job, "COMPLETED", timeout=60)
    slurm.wait_for(child, "COMPLETED")  # a requeue is no failure, whatever the script's exit code was
    text = (tmp_path / "log").read_text()
    first, second = re.findall(r"on (n\d)", text)
    assert first != second
    assert "refused" in text
    assert "later avoided" in text


def test_no_requeue_means_no_requeue(slurm: PrivateSlurm) -> None:
    job = slurm.submit("sleep 300", "--no-requeue", "--output=/dev/null")
    slurm.wait_for(job, "RUNNING")
    refused = slurm.run("scontrol", "requeue", job, check=False)
    assert refused.returncode == 1
    assert "Requested operation is presently disabled" in refused.stderr
    assert slurm.job(job)["JobState"] == "RUNNING"


def test_the_high_partition_requeues_a_job_of_main(slurm: PrivateSlurm, tmp_path: Path, note: Note) -> None:
    log = tmp_path / "log"
    script = """
        trap 'echo "TERM at $(date +%s.%N)"; exit 0' TERM
        trap 'echo warned' USR2
        echo "attempt ${SLURM_RESTART_COUNT-unset}"
        [[ -n ${SLURM_RESTART_COUNT-} ]] && exit 0
        sleep 300 & wait
    """
    every_node = ("--nodes=3", "--exclusive")
    low = slurm.submit(script, *every_node, "--requeue", "--open-mode=append", "--signal=B:USR2@60", f"--output={log}")
    wait_for_text(log, "attempt unset")
    asked = time.time()
    high = slurm.submit("sleep 3", *every_node, "--partition=high", "--output=/dev/null")
    wait_for_text(log, "TERM at")
    slurm.wait_for(high, "RUNNING")
    assert slurm.job(low)["JobState"] == "PENDING"
    slurm.wait_for(high, "COMPLETED")
    assert slurm.wait_for(low, "COMPLETED", timeout=60)["Restarts"] == "1"
    text = log.read_text()
    assert text.index("attempt unset") < text.index("TERM at") < text.index("attempt 1")
    assert "warned" not in text, "the warning of --signal is for the time limit only"
    note(
        f"the shell had TERM {float(text.split('TERM at ')[1].split()[0]) - asked:.1f} s after the other job was submitted"
    )


def test_a_job_of_a_dead_node_is_requeued_while_its_old_step_lives_on(
    slurm: PrivateSlurm, tmp_path: Path, note: Note
) -> None:
    script = f"""
        echo "$(hostname)" >{tmp_path}/host.${{SLURM_RESTART_COUNT-0}}
        srun bash -c 'while sleep 0.2; do echo . >>{tmp_path}/beats.${{SLURM_RESTART_COUNT-0}}; done'
    """
    beats = tmp_path / "beats.0"
    job = slurm.submit(script, "--requeue", "--open-mode=append", f"--output={tmp_path}/log")
    wait_for_text(beats, ".")
    node = slurm.job(job)["NodeList"]
    slurm.kill_node(node)
    killed = time.monotonic()
    slurm.wait_for(job, "PENDING", timeout=90)
    note(f"the job was pending again {time.monotonic() - killed:.1f} s after its slurmd was killed (SlurmdTimeout=10)")
    assert slurm.node_state(node).startswith("DOWN")
    wait_for_text(tmp_path / "beats.1", ".", 60)
    assert slurm.job(job)["NodeList"] != node
    assert slurm.job(job)["Restarts"] == "1"
    size = beats.stat().st_size
    wait_until("two writers at once", lambda: beats.stat().st_size > size, 10)

    slurm.revive_node(node)
    wait_until("the end of the old step", lambda: not slurm.pids_on(node), 60)
    note(f"the old step ended when slurmd came back, {time.monotonic() - killed:.1f} s after its death")


def test_a_dependant_of_a_failed_job_goes_or_hangs(slurm: PrivateSlurm) -> None:
    parent = slurm.submit("sleep 1; exit 1", "--output=/dev/null")
    flags = (f"--dependency=afterok:{parent}", "--output=/dev/null")
    killed = slurm.submit("true", *flags, "--kill-on-invalid-dep=yes")
    hangs = slurm.submit("true", *flags)
    follows = slurm.submit("true", f"--dependency=afterany:{parent}", "--output=/dev/null")
    slurm.wait_for(parent, "FAILED")
    slurm.wait_for(killed, "CANCELLED")
    slurm.wait_for(follows, "COMPLETED")
    wait_until("the reason", lambda: slurm.job(hangs)["Reason"] == "DependencyNeverSatisfied", 15)
    assert slurm.job(hangs)["JobState"] == "PENDING"


def test_a_job_sees_the_gpus_that_it_asked_for(slurm: PrivateSlurm, tmp_path: Path) -> None:
    script = 'echo "$CUDA_VISIBLE_DEVICES"; sleep 2'
    flags = ("--nodelist=n1", "--gres=gpu:h100:2")
    jobs = [slurm.submit(script, *flags, f"--output={tmp_path}/{number}") for number in range(2)]
    for job in jobs:
        slurm.wait_for(job, "COMPLETED")
    assert [(tmp_path / str(number)).read_text() for number in range(2)] == ["0,1\n", "2,3\n"]
    refused = slurm.run("sbatch", "--gres=gpu:h100:5", "--wrap=true", check=False)
    assert refused.returncode == 1
    assert "Requested node configuration is not available" in refused.stderr
    assert "gpu:h100:4" in slurm.run("sinfo", "--noheader", "-o", "%20N %10c %10m %25f %G").stdout


def test_the_warning_reaches_the_shell_and_the_limit_ends_the_job(
    slurm: PrivateSlurm, tmp_path: Path, note: Note
) -> None:
    heeds = """
        trap 'echo "warned after $SECONDS s"; exit 0' USR2
        srun sleep 300 & wait
    """
    ignores = """
        trap 'echo "TERM after $SECONDS s"' TERM
        sleep 300 & while :; do wait; done
    """
    heeding = slurm.submit(heeds, "--time=1", "--signal=B:USR2@30", f"--output={tmp_path}/heeds")
    ignoring = slurm.submit(ignores, "--time=1", f"--output={tmp_path}/ignores")
    flags = (f"--dependency=afterok:{ignoring}", "--kill-on-invalid-dep=yes", "--output=/dev/null")
    after_success = slurm.submit("true", *flags)
    after_all = slurm.submit("true", f"--dependency=afterany:{ignoring}", "--output=/dev/null")
    slurm.wait_for(heeding, "COMPLETED", timeout=90)
    slurm.wait_for(ignoring, "TIMEOUT", timeout=150)
    slurm.wait_for(after_success, "CANCELLED")
    slurm.wait_for(after_all, "COMPLETED")
    for name in ("heeds", "ignores"):
        text = re.search(r"(warned|TERM) after \d+ s", (tmp_path / name).read_text())
        assert text
        note(f"{text[0]}, of a limit of 60 s{' and --signal=B:USR2@30' if name == 'heeds' else ''}")


def test_a_limit_beyond_the_partitions_is_accepted_and_pends_for_ever(slurm: PrivateSlurm) -> None:
    flags = ("--partition=short", "--time=3", "--output=/dev/null")
    assert slurm.run("sbatch", "--test-only", *flags, "--wrap=true").returncode == 0
    job = slurm.submit("true", *flags)
    wait_until("the reason", lambda: slurm.job(job)["Reason"] == "PartitionTimeLimit", 15)
    assert slurm.job(job)["JobState"] == "PENDING"


def test_jobs_run_on_while_the_controller_is_away(slurm: PrivateSlurm, tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = slurm.submit("echo begun; sleep 3; echo ended", f"--output={log}")
    child = slurm.submit("true", f"--dependency=afterok:{job}", "--output=/dev/null")
    wait_for_text(log, "begun")
    slurm.stop_controller()
    assert slurm.run("scontrol", "ping", check=False).returncode == 1
    assert "Unable to contact slurm controller" in slurm.run("squeue", check=False).stderr
    wait_for_text(log, "ended")
    slurm.start_controller()
    slurm.wait_for(job, "COMPLETED", timeout=60)
    slurm.wait_for(child, "COMPLETED", timeout=60)


def test_an_array_index_has_a_limit(slurm: PrivateSlurm) -> None:
    for array in ("0-20", "0,20"):
        refused = slurm.run("sbatch", f"--array={array}", "--wrap=true", "--output=/dev/null", check=False)
        assert refused.returncode == 1
        assert "Invalid job array specification" in refused.stderr
    slurm.run("sbatch", "--array=0-19", "--hold", "--wrap=true", "--output=/dev/null")
    assert "MaxArraySize            = 20\n" in slurm.run("scontrol", "show", "config").stdout


def test_another_slurms_variables_stay_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    foreign = (
        "SLURM_CONF SLURM_JOB_ID SBATCH_PARTITION SALLOC_ACCOUNT SQUEUE_FORMAT SACCT_FORMAT SINFO_FORMAT SLURM_CLUSTERS"
    )
    for name in foreign.split():
        monkeypatch.setenv(name, "theirs")
    env = clean_environment(tmp_path)
    assert env["SLURM_CONF"] == str(tmp_path / "slurm.conf")
    assert not [name for name, value in env.items() if value == "theirs"]


def test_a_slurm_that_cannot_start_says_why_and_leaves_nothing(root: Path) -> None:
    slurm = PrivateSlurm(root, 1, settings={"SelectType": "select/nonsense"})
    with pytest.raises(SlurmError, match="select/nonsense"):
        slurm.start()
    assert not root.exists()
    assert not any(slurm.processes.alive(name) for name in slurm.processes.known)


def test_stopping_ends_all_that_jobs_have_left_and_nothing_else(
    slurm: PrivateSlurm, root: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with PrivateSlurm(root, 1) as second:
        theirs = second.submit("setsid --fork sleep 1001; trap '' TERM; echo started; sleep 1002", f"--output={log}")
        ours = slurm.submit("sleep 300", "--output=/dev/null")
        wait_for_text(log, "started")
        slurm.wait_for(ours, "RUNNING")
        second.kill_node("n1")
        pids = second.pids_on("n1")
        commands = {Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip() for pid in pids}
        assert {"sleep 1001", "sleep 1002"} <= commands
        assert theirs == "1"
    wait_until("the end of the job's processes", lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids), 5)
    assert not root.exists()
    assert slurm.job(ours)["JobState"] == "RUNNING"


def test_a_person_starts_one_uses_it_and_stops_it(root: Path) -> None:
    def harness(verb: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, str(HARNESS), verb, str(root)]
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)

    assert harness("start").returncode == 0
    try:
        assert "is not empty" in harness("start").stderr
        exports = harness("env").stdout
        shell = f"{exports}\nsinfo --noheader --nodes=n3 --partition=main -o '%T %c'"
        env = os.environ | {"SINFO_FORMAT": "%a"}
        seen = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, env=env, timeout=30, check=True)
        assert seen.stdout == "idle 8\n"
    finally:
        assert harness("stop").returncode == 0
    assert not root.exists()
    again = harness("stop")
    assert again.returncode == 3
    assert "no private Slurm is there" in again.stderr


def test_accounting_knows_how_jobs_ended(root: Path, note: Note) -> None:
    if why := reason(accounting=True):
        pytest.skip(why)
    before = time.monotonic()
    with PrivateSlurm(root, 1, accounting=True) as slurm:
        note(f"started with slurmdbd and its database in {time.monotonic() - before:.1f} s")
        job = slurm.submit("exit 3", "--output=/dev/null", "--account=default")
        slurm.wait_for(job, "FAILED")
        call = ("sacct", "-n", "-X", "-P", "-j", job, "-o", "State,ExitCode,Account")
        wait_until("the job's record", lambda: slurm.run(*call).stdout == "FAILED|3:0|default\n", 30)
