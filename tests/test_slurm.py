"""Slurm's commands, as they answer, fail, hang and lie; the commands here are small fakes on PATH."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from fake_slurm import USER, sacct_list, squeue_list
from fakes import Fake, calls

from pipeline.errors import EXIT_NOT_READY, EXIT_USAGE, UserError
from pipeline.slurm.commands import Slurm
from pipeline.slurm.environment import job_environment
from pipeline.slurm.errors import SlurmError, SlurmFull, SlurmRefused
from pipeline.slurm.jobs import COLUMNS, SACCT_COLUMNS, SlurmJob, from_squeue
from pipeline.slurm.launch_errors import nodes_named
from pipeline.slurm.node_lists import expand_node_list, few_nodes
from pipeline.slurm.states import ENDED, LIVE, explain_reason, normal_state

SLURM = Slurm(timeout=20, pauses=(0, 0))
HOSTILE = [
    "a b",
    "a'b",
    '"',
    "$(touch owned)",
    "`touch owned`",
    "a;touch owned",
    "new\nline",
    "-rf",
    "*",
    "é🦙",
    "\\",
    "",
]


def row(
    job_id: str,
    state: str,
    *,
    code: str = "0",
    restarts: int = 0,
    start: str = "N/A",
    nodes: str = "",
    reason: str = "None",
    **more: str,
) -> dict[str, object]:
    """Describe a Job as squeue would."""
    return {
        "id": job_id, "state": state, "exit_code": code, "restarts": restarts, "left": "9:57", "limit": "10:00",
        "start": start, "nodes": nodes, "reason": reason, **more,
    }  # fmt: skip


def queued(job_id: str, state: str, comment: str) -> str:
    """Return squeue's answer that one Job with a comment is there."""
    return squeue_list([row(job_id, state, comment=comment)])


def sacct_of(*rows: tuple[str, ...]) -> str:
    return "cat <<'END'\n" + sacct_list(*rows) + "END"


def squeue_of(*rows: dict[str, object]) -> str:
    return "cat <<'END'\n" + squeue_list(list(rows)) + "END"


# Submitting


@pytest.mark.parametrize("reply", ["101", "101;cluster", "Welcome to this cluster\n101", "  101  ", "101\n\nbye"])
def test_an_id_is_a_whole_line(fake: Fake, reply: str) -> None:
    fake("sbatch", f"echo 'sbatch: warning: can not run 1 processes on 2 nodes' >&2; echo '{reply}'")
    assert SLURM.submit(["--hold"], "x.sbatch", ["runs/x"], "token") == "101"
    assert calls("sbatch") == ["--parsable --comment=token --hold x.sbatch runs/x"]


@pytest.mark.parametrize("reply", ["", "Submitted batch job 101", "job 101", "1e3", "101;", "101\n102", "101;a b"])
def test_anything_else_is_no_id_and_said_as_it_is(fake: Fake, reply: str) -> None:
    fake("sbatch", f"printf %s '{reply}'")
    fake("squeue", squeue_of())
    with pytest.raises(SlurmError) as error:
        SLURM.submit([], "x.sbatch", [], "token")
    assert (reply.strip() or "said nothing") in str(error.value)
    assert error.value.exit_code == EXIT_NOT_READY
    assert len(calls("sbatch")) == 3  # bounded


TIMED_OUT = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"


def test_a_job_that_was_taken_in_silence_is_adopted(fake: Fake) -> None:
    fake("sbatch", f"echo {shlex.quote(queued('11', 'PENDING', 'run|a token'))} >> queue; {TIMED_OUT}")
    fake("squeue", "cat queue")
    assert SLURM.submit([], "x.sbatch", [], "run|a token") == "11"
    assert len(calls("sbatch")) == 1


def test_a_job_that_was_not_taken_is_submitted_again(fake: Fake) -> None:
    fake("sbatch", f"[[ -e tried ]] && {{ echo 12; exit; }}; touch tried; {TIMED_OUT}")
    fake("squeue", squeue_of(row("11", "RUNNING", comment="another")))
    assert SLURM.submit([], "x.sbatch", [], "token") == "12"
    assert len(calls("sbatch")) == 2


def test_nothing_is_submitted_twice_while_nobody_can_say_whether_it_is_there(fake: Fake) -> None:
    fake("sbatch", TIMED_OUT)
    fake("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1")
    with pytest.raises(SlurmError, match="give the same command again") as error:
        SLURM.submit([], "x.sbatch", [], "token")
    assert "Socket timed out" in str(error.value)
    assert "Unable to contact" in str(error.value)
    assert len(calls("sbatch")) == 1


def test_an_sbatch_that_hangs_is_ended_with_its_children_and_the_job_found(fake: Fake, tmp_path: Path) -> None:
    fake("sbatch", f"echo {shlex.quote(queued('13', 'PENDING', 'token'))} > queue; sleep 300 & echo $! > child; wait")
    fake("squeue", "cat queue")
    assert Slurm(timeout=1, pauses=(0,)).submit([], "x.sbatch", [], "token") == "13"
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            return
        time.sleep(0.05)
    pytest.fail("the child of the command that hung is alive")


REFUSALS = {
    "Batch job submission failed: Invalid partition name specified": "mend partition",
    "Batch job submission failed: Invalid account or account/partition combination specified": "`sinfo -s`",
    "Batch job submission failed: Invalid generic resource (gres) specification": "gpus_per_node, gpu_type or gpu_flag",
    "Batch job submission failed: Requested node configuration is not available": "ask for less",
    "QOSMaxNodePerJobLimit\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit "
    "limit, user's size and/or time limits)": "mend qos",
    "Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)": "lower the stage's",
    "Batch job submission failed: Invalid feature specification": "",
    "Batch job submission failed: Invalid qos specification": "sacctmgr show qos",
    "Batch job submission failed: Job dependency problem": "",
    "Invalid --time specification": "",
    "Unable to open file /x.sbatch": "",
}


# Of Slurm's own texts and of those that sites and the machines between them add.
PASSING = [
    "Slurm job queue full, sleeping and retrying\nsbatch: error: Batch job submission failed: MaxJobCount limit reached",
    "Slurm temporarily unable to accept job, sleeping and retrying",
    "Batch job submission failed: Authentication credential expired",
    "Batch job submission failed: Job credential expired",
    "Batch job submission failed: Protocol authentication error",
    "Batch job submission failed: Invalid authentication credential",
    "Batch job submission failed: Unable to contact slurm controller (connect failure)",
    "Batch job submission failed: Rate limit exceeded, please retry momentarily",
    "Batch job submission failed: Required partition not available (inactive or drain)",
    "Batch job submission failed: System submissions disabled",
    "Batch job submission failed: I/O error writing script/environment to file",
    "Batch job submission failed: Invalid user id",
    "Batch job submission failed: Unspecified error",
    "Batch job submission failed: A sentence of a Slurm that is yet to come",
    "Munge encode failed: Failed to connect to munged",
    "cli_filter plugin terminated with error",
    "lua: the budget service does not answer",
    "getcwd failed: Stale file handle",
]


@pytest.mark.parametrize("text", PASSING)
def test_what_may_pass_is_tried_again_and_is_no_final_word(fake: Fake, text: str) -> None:
    fake("sbatch", f"[[ -e tried ]] && {{ echo 12; exit; }}; touch tried; printf 'sbatch: error: {text}\n' >&2; exit 1")
    fake("squeue", squeue_of())
    assert SLURM.submit([], "x.sbatch", [], "token") == "12"
    fake("sbatch", f"printf 'sbatch: error: {text}\n' >&2; exit 1")
    with pytest.raises(SlurmError) as error:
        SLURM.submit([], "x.sbatch", [], "token")
    assert error.value.exit_code == EXIT_NOT_READY
    assert not isinstance(error.value, SlurmRefused)


@pytest.mark.parametrize(
    "limit",
    ["QOSMaxSubmitJobPerUserLimit", "AssocMaxSubmitJobLimit", "AssocGrpSubmitJobsLimit", "QOSGrpSubmitJobsLimit", ""],
)
def test_a_submit_limit_is_said_at_once_and_passes(fake: Fake, limit: str) -> None:
    violates = "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    fake("sbatch", f"""printf "sbatch: error: {limit}\nsbatch: error: {violates}\n" >&2; exit 1""")
    with pytest.raises(SlurmFull, match="how many Jobs") as error:
        SLURM.submit([], "x.sbatch", [], "token")
    assert error.value.exit_code == EXIT_NOT_READY
    assert len(calls("sbatch")) == 1


@pytest.mark.parametrize("text", REFUSALS)
def test_a_refusal_is_final_and_comes_with_command_text_and_remedy(fake: Fake, text: str) -> None:
    fake("sbatch", f'echo "sbatch: error: {text}" >&2; exit 1')
    with pytest.raises(SlurmRefused) as error:
        SLURM.submit(["--gres=gpu:h100:8"], "x.sbatch", [], "token")
    message = str(error.value)
    assert "--gres=gpu:h100:8" in message
    assert text in message
    assert REFUSALS[text] in message
    assert error.value.exit_code == EXIT_USAGE
    assert len(calls("sbatch")) == 1


def test_only_the_gpu_option_that_the_site_takes_is_taken(fake: Fake) -> None:
    fake("sbatch", "[[ $* = *--gpus-per-node=8* ]] && { echo 5; exit; }\n"
         "echo 'sbatch: error: Batch job submission failed: Invalid generic resource (gres) specification' >&2; exit 1")  # fmt: skip
    assert SLURM.submit(["--gpus-per-node=8"], "x.sbatch", [], "a") == "5"
    with pytest.raises(SlurmRefused, match="gpu_flag"):
        SLURM.submit(["--gres=gpu:8"], "x.sbatch", [], "b")


@pytest.mark.parametrize("word", HOSTILE)
def test_hostile_words_arrive_as_they_are(fake: Fake, tmp_path: Path, word: str) -> None:
    fake("sbatch", r"printf '%s\0' " '"$@" > words; echo 1')
    slurms = [
        SLURM,
        Slurm(("env",)),
        Slurm(("bash", "-c"), "one-string"),
        Slurm(("bash", "-c", 'bash -c "$0"'), "one-string"),
        Slurm(("bash", "-c", 'bash -c "bash -c $0"'), "two-strings"),
    ]
    for slurm in slurms:
        slurm.submit([f"--job-name={word}"], f"{word}/x.sbatch", [word], f"t {word}")
        words = (tmp_path / "words").read_bytes().decode().split("\0")[:-1]
        assert words == ["--parsable", f"--comment=t {word}", f"--job-name={word}", f"{word}/x.sbatch", word]
    assert not (tmp_path / "owned").exists()


def test_one_string_is_one_word_after_the_prefix() -> None:
    command = Slurm(("su", "-", "user", "-c"), "one-string").command(["squeue", "-o", "%i|%T"])
    assert command[:4] == ["su", "-", "user", "-c"]
    assert len(command) == 5
    assert command[4].endswith("LC_ALL=C squeue -o '%i|%T'")


def test_test_only_tells_when_and_what_could_never_be(fake: Fake) -> None:
    fake("sbatch", "echo 'sbatch: Job 9 to start at 2026-01-01T00:00:00 using 8 processors on nodes n1' >&2")
    assert "to start at 2026" in SLURM.test_only(["-N2"], "x.sbatch", ["runs/x"])
    assert calls("sbatch") == ["--test-only -N2 x.sbatch runs/x"]
    fake("sbatch", "echo 'allocation failure: Requested node configuration is not available' >&2; exit 1")
    with pytest.raises(SlurmRefused):
        SLURM.test_only(["-N2"], "x.sbatch")


def test_tokens_are_found_by_one_call_and_only_whole(fake: Fake) -> None:
    rows = ("7 COMPLETED a", "8 COMPLETED a", "9 PENDING b", "10 RUNNING b", "11 RUNNING bb", "12 RUNNING c|d")
    rows += ("13 PREEMPTED d", "14 NEW_ONE d", "15_2 RUNNING e", "15_[3-4] PENDING e")
    fake("squeue", squeue_of(*(row(job_id, state, comment=word) for job_id, state, word in map(str.split, rows))))
    found = SLURM.find(["a", "b", "c|d", "d", "e", "f"])
    assert found == {"a": "8", "b": "9", "c|d": "12", "d": "14", "e": "15"}
    assert len(calls("squeue")) == 1


def test_a_missing_command_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match=r"sbatch: no such command here\nWhat to do: load Slurm's commands"):
        SLURM.submit([], "x.sbatch", [], "token")
    assert not SLURM.ping()


def test_what_a_command_leaves_behind_is_not_waited_for(fake: Fake, tmp_path: Path) -> None:
    fake(
        "squeue", squeue_of(row("7", "RUNNING", comment="a")) + "\nsleep 300 & echo $! > child"
    )  # as ssh does to share its connection
    try:
        assert Slurm(timeout=20).find(["a"]) == {"a": "7"}
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_no_command_sees_what_a_parent_job_or_a_shell_has_set(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = {
        "SLURM_JOB_ID": "7", "SLURM_MEM_PER_CPU": "2000", "SBATCH_PARTITION": "debug", "SLURM_EXPORT_ENV": "NONE",
        "SQUEUE_FORMAT": "%i", "SQUEUE_STATES": "PD", "SACCT_FORMAT": "x", "PMI_RANK": "1", "PMIX_X": "1",
        "PYXIS_CONTAINER_IMAGE": "x",
    }  # fmt: skip
    for name, value in {**foreign, "SLURM_CONF": "/etc/ours.conf", "HOME": "/home/x", "LC_ALL": "de_DE"}.items():
        monkeypatch.setenv(name, value)
    fake("squeue", "env > environment; " + squeue_of())
    for slurm in (SLURM, Slurm(("env",))):
        slurm.find(["x"])
        lines = (tmp_path / "environment").read_text().splitlines()
        assert not [line for line in lines if line.partition("=")[0] in foreign]
        assert {"SLURM_CONF=/etc/ours.conf", "HOME=/home/x", "LC_ALL=C"} <= set(lines)


def test_a_persons_token_is_kept_outside_of_jobs(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake("squeue", "env > environment; " + squeue_of())
    monkeypatch.setenv("SLURM_JWT", "eyJ")
    SLURM.find(["x"])
    assert "SLURM_JWT=eyJ" in (tmp_path / "environment").read_text()
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # sbatch hands it on, and by now it may have expired
    SLURM.find(["x"])
    assert "SLURM_JWT" not in (tmp_path / "environment").read_text()


def test_one_of_several_clusters_is_named_to_every_command(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    two = Slurm(timeout=20, pauses=(0,), cluster="two")
    fake("sbatch", "echo '7;two'")
    fake("squeue", "echo 'CLUSTER: two'; " + squeue_of(row("7", "RUNNING")))
    fake("scontrol", "echo 'Slurmctld(primary) at x is UP'")
    fake("scancel", "")
    fake("sinfo", "echo 'CLUSTER: two'; echo 'main*|up|1-00:00:00|3|8|8000|(null)'")
    assert two.submit(["--hold"], "x.sbatch", [], "token") == "7"
    assert two.jobs(["7"])["7"].state == "running"
    assert two.ping()
    assert [partition.name for partition in two.partitions()] == ["main"]
    two.cancel(["7"])
    for name in ("sbatch", "squeue", "scontrol", "scancel", "sinfo"):
        assert [call.split()[0] for call in calls(name)] == ["--clusters=two"]
    assert "sbatch --clusters=two -N2" in " ".join(Slurm(("env",), cluster="two").command(["sbatch", "-N2"]))
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "two")  # on a node of its own
    two.requeue("7")
    assert calls("scontrol")[-1] == "requeue 7"


def test_where_comments_are_the_sites_a_job_is_known_by_its_name(fake: Fake) -> None:
    slurm = Slurm(timeout=20, pauses=(0, 0), mark="name")
    older = row("7", "RUNNING", name="a-pretrain-abc", comment="site: 5 GPUh")
    fake("squeue", "cat queue")
    Path("queue").write_text(squeue_list([older]))
    new = squeue_list([older, row("9", "PENDING", name="a-pretrain-abc"), row("8", "PENDING", name="b-pretrain-abcd")])
    fake("sbatch", f"echo {shlex.quote(new)} > queue; {TIMED_OUT}")
    assert slurm.submit(["--job-name=a-pretrain-abc"], "x.sbatch", [], "token") == "9"
    fake("sbatch", f"[[ -e tried ]] && {{ echo 12; exit; }}; touch tried; {TIMED_OUT}")
    assert slurm.submit(["--job-name=a-pretrain-abc"], "x.sbatch", [], "token") == "12"
    assert [job.job_id for job in slurm.of_run("abc")] == ["7", "9"]
    fake("squeue", "exit 1")
    with pytest.raises(SlurmError, match="squeue"):  # never blindly
        slurm.submit(["--job-name=a-pretrain-abc"], "x.sbatch", [], "token")


def test_a_runs_jobs_are_known_by_their_comment(fake: Fake) -> None:
    fake(
        "squeue",
        squeue_of(row("1", "RUNNING", comment="pipeline:abc:pretrain.000001"), row("2", "RUNNING", name="x-abc")),
    )
    assert [job.job_id for job in SLURM.of_run("abc")] == ["1"]


# Looking


def test_all_jobs_are_read_by_one_call(fake: Fake) -> None:
    fake(
        "squeue",
        squeue_of(
            row("1", "RUNNING", nodes="n[1-2]"),
            row("2", "PENDING", reason="Priority", start="2026-01-01T00:00:00"),
        ),
    )
    found = SLURM.jobs(["1", "2"])
    assert (found["1"].state, found["1"].nodes, found["1"].time_left, found["1"].source) == (
        "running",
        "n[1-2]",
        597,
        "squeue",
    )
    assert (
        found["2"].explain()
        == "waits for Jobs of higher priority; nothing to do; Slurm expects to start it at 2026-01-01T00:00:00"
    )
    (call,) = calls("squeue")
    assert call == f"-a -j 1,2 --states=all -O {COLUMNS}"
    assert calls("scontrol") == calls("sacct") == []


def test_status_of_a_hundred_jobs_is_one_call(fake: Fake) -> None:
    ids = [str(number) for number in range(1, 101)]
    fake("squeue", squeue_of(*(row(job_id, "PENDING", reason="Dependency") for job_id in ids)))
    assert {job.state for job in SLURM.jobs(ids).values()} == {"pending"}
    assert len(calls("squeue")) == 1


SCONTROL = (
    "echo 'JobId=2 JobName=x UserId=ada(1000) Comment=a token JobState=FAILED Reason=NonZeroExitCode Restarts=1 ExitCode=7:0 "
    "Command=/a JobState=COMPLETED ExitCode=0:0'; echo 'JobId=9 JobState=RUNNING'"
)


def test_sacct_is_asked_once_for_all_that_squeue_has_forgotten(fake: Fake) -> None:
    fake("squeue", squeue_of(row("1", "RUNNING")))
    fake("sacct", sacct_of(("3", "COMPLETED", "0:0", "01:00:00", "n1"), ("4", "RUNNING", "0:0", "01:00:00", "n1")))
    found = SLURM.jobs(["1", "3", "4", "5"], settled={"5"})
    assert [found[job_id].source for job_id in "1345"] == ["squeue", "sacct", "none", "none"]
    assert found["3"].success
    assert found["4"].state == "unknown"
    assert found["4"].gone  # the database keeps as running what a controller lost
    assert "neither squeue nor sacct knows it" in found["4"].explain()
    assert calls("sacct") == [f"-n -X -P --delimiter=\x1f -j 3,4 -o {SACCT_COLUMNS}"]
    assert calls("scontrol") == []


def test_without_accounting_nothing_is_asked_about_all_jobs_of_the_cluster(fake: Fake) -> None:
    fake("squeue", squeue_of(row("1", "RUNNING")))
    fake("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    fake("scontrol", SCONTROL)
    assert [SLURM.jobs(ids)["2"].gone for ids in (["1", "2"], ["1", "2", "3"])] == [True, True]
    assert calls("scontrol") == []  # squeue and scontrol ask the same controller


def test_where_squeue_cannot_be_read_scontrol_is_asked_about_one_job(fake: Fake) -> None:
    fake("squeue", "echo '<html>you are signed out</html>'")
    fake("sacct", "exit 1")
    fake("scontrol", SCONTROL)
    job = SLURM.jobs(["2"])["2"]
    assert (job.state, job.exit_code, job.restarts, job.user, job.comment) == ("failed", 7, 1, "ada", "a token")
    assert all(job.alive for job in SLURM.jobs(["2", "3"]).values())
    assert [call.split()[-1] for call in calls("scontrol")] == ["2"]


def test_another_users_job_that_is_not_listed_may_be_hidden(fake: Fake) -> None:
    fake("squeue", squeue_of(row("1", "RUNNING")))
    fake("sacct", "exit 1")
    found = SLURM.jobs(["1", "2", "3"], others={"1", "2"})
    assert [found[job_id].alive for job_id in "123"] == [True, True, False]


def test_nothing_more_is_asked_about_what_has_left_word(fake: Fake) -> None:
    fake("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    SLURM.jobs(["1", "2"], settled={"1", "2"})
    assert calls("sacct") == calls("scontrol") == []


@pytest.mark.parametrize(
    ("state", "code", "shown"),
    [
        ("COMPLETED", "1:0", "completed: its script ended with an error; see its log (exit code 1)"),
        ("OUT_OF_MEMORY", "0:125", "out_of_memory: used more memory than it had asked for; raise mem, or lower micro_batch_size (signal 125)"),
        ("CANCELLED by 1000", "0:0", "cancelled: by a person or the chain"),
        ("TIMEOUT", "0:15", "timeout: ran into its time limit (signal 15)"),
        ("NODE_FAIL", "0:0", "node_fail: lost a node"),
    ],
)  # fmt: skip
def test_success_is_completed_with_0_and_0(fake: Fake, state: str, code: str, shown: str) -> None:
    fake("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    fake("sacct", sacct_of(("5", state, code, "01:00:00", "n1")))
    job = SLURM.jobs(["5"])["5"]
    assert not job.success
    assert job.ended
    assert job.explain() == shown


@pytest.mark.parametrize("answer", ["echo 'Slurm accounting storage is disabled' >&2; exit 1", "", "echo 'garbage'"])
def test_without_accounting_a_forgotten_job_is_unknown(fake: Fake, answer: str) -> None:
    fake("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    fake("sacct", answer)
    job = SLURM.jobs(["5"])["5"]
    assert (job.state, job.source, job.success, job.ended) == ("unknown", "none", False, False)


TORN = {
    "hangs": "sleep 60",
    "fails": "exit 1",
    "says nothing": "",
    "a word": "echo 'a b c'",
    "an older form": "echo '5|5|COMPLETED|0|0|9:57|10:00|N/A|n1|None|'",
    "no titles": f"printf %s {shlex.quote(squeue_list([row('5', 'COMPLETED')]).partition(chr(10))[2])}",
    "half a row": f"printf %s {shlex.quote(squeue_list([row('5', 'COMPLETED')])[:-8])}",
    "a short row": f"printf %s {shlex.quote(squeue_list([row('6', 'COMPLETED')]).replace('None' + chr(31), ''))}",
    "no id": f"printf %s {shlex.quote(squeue_list([row('x', 'COMPLETED')]))}",
}


@pytest.mark.parametrize("answer", TORN)
def test_where_squeue_does_not_answer_as_it_should_the_job_may_be_alive(fake: Fake, answer: str) -> None:
    fake("squeue", TORN[answer])
    job = SLURM.jobs(["5"], timeout=2)["5"]
    assert (job.state, job.source, job.success) == ("unknown", "none", False)
    assert (job.answered, job.alive, job.gone, job.ended) == (False, True, False, False)
    assert "does not answer" in job.explain()


@pytest.mark.parametrize("answer", TORN)
def test_nothing_is_submitted_again_while_squeue_cannot_be_read(fake: Fake, answer: str) -> None:
    fake("sbatch", TIMED_OUT)
    fake("squeue", TORN[answer])
    with pytest.raises(SlurmError, match="give the same command again"):
        Slurm(timeout=2, pauses=(0, 0)).submit([], "x.sbatch", [], "token")
    assert len(calls("sbatch")) == 1


def test_an_empty_list_is_an_answer(fake: Fake) -> None:
    fake("squeue", "echo 'Welcome'; echo 'CLUSTER: one'; " + squeue_of() + "\necho bye")
    job = SLURM.jobs(["5"])["5"]
    assert (job.state, job.answered, job.gone, job.alive) == ("unknown", True, True, False)


def test_free_text_shifts_nothing(fake: Fake) -> None:
    fake("squeue", squeue_of(
        row("1", "RUNNING", name="a|b\nc é", comment="x\n2|2|COMPLETED|\r", dependency="(null)"),
        row("3", "RUNNING", name="a\x1fb", comment="pipeline:abc:pretrain.000001"),
        row("4", "PENDING", name="own", comment="pipeline:abc:pretrain.000002", dependency="afterany:1(unfulfilled),singleton(unfulfilled)"),
    ))  # fmt: skip
    found = SLURM.jobs(["1", "2", "3", "4"])
    assert [found[job_id].state for job_id in "1234"] == ["running", "unknown", "running", "pending"]
    assert (found["1"].name, found["1"].comment, found["1"].dependency) == ("a|b\nc é", "x\n2|2|COMPLETED|", "")
    assert (found["3"].name, found["3"].comment, found["3"].user) == ("", "", USER)
    own = found["4"]
    assert (own.name, own.comment, own.user) == ("own", "pipeline:abc:pretrain.000002", USER)
    assert own.dependency == "afterany:1(unfulfilled),singleton(unfulfilled)"


ALIVE = "PENDING RUNNING COMPLETING SUSPENDED REQUEUED REQUEUE_HOLD CONFIGURING SIGNALING EXPEDITING REVOKED NEW_ONE".split()


@pytest.mark.parametrize("state", ALIVE)
def test_what_squeue_names_is_alive_unless_it_ended(fake: Fake, state: str) -> None:
    fake("squeue", squeue_of(row("5", state)))
    job = SLURM.jobs(["5"])["5"]
    assert (job.alive, job.gone, job.ended) == (True, False, False)


@pytest.mark.parametrize("state", sorted(ENDED))
def test_a_final_state_is_final(fake: Fake, state: str) -> None:
    assert state not in LIVE
    fake("squeue", squeue_of(row("5", state.upper())))
    job = SLURM.jobs(["5"])["5"]
    assert (job.alive, job.gone, job.ended) == (False, True, True)


def test_an_array_is_as_far_as_the_least_of_its_tasks(fake: Fake) -> None:
    def state_of(*rows: str) -> str:
        fake("squeue", squeue_of(*rows))
        return SLURM.jobs(["4"])["4"].state

    done, bad = row("4_0", "COMPLETED"), row("4_1", "FAILED", code="256")
    assert state_of(done, row("4_1", "RUNNING"), row("4_[2-3%1]", "PENDING")) == "running"
    assert state_of(done, bad, row("4_[2-3]", "PENDING")) == "pending"
    assert state_of(done, bad) == "failed"
    assert state_of(done, row("4_1", "COMPLETED")) == "completed"
    fake("squeue", squeue_of(done, bad))
    found = SLURM.jobs(["4_0", "4_1"])
    assert (found["4_0"].success, found["4_1"].exit_code) == (True, 1)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("RUNNING", "running"), ("CANCELLED by 0", "cancelled"), ("CANCELLED+", "cancelled"), ("RH", "requeue_hold"),
        ("SE", "requeue_hold"), ("SPECIAL_EXIT", "requeue_hold"), ("NODE_FAIL", "node_fail"), ("['RUNNING']", "running"),
        ("['COMPLETING','RUNNING']", "completing"), ("OUT_OF_MEMORY", "out_of_memory"), ("CONFIGURING", "pending"),
        ("", "unknown()"), ("FROBNICATED", "unknown(FROBNICATED)"), ("PD", "pending"), ("TO", "timeout"),
    ],
)  # fmt: skip
def test_states(text: str, state: str) -> None:
    assert normal_state(text) == state


@pytest.mark.parametrize(
    ("reason", "words", "stuck"),
    [
        ("DependencyNeverSatisfied", "blocked for ever", True),
        ("Dependency", "waits for a Job before it", False),
        ("Priority", "higher priority", False),
        ("Resources", "until enough nodes are free", False),
        ("BeginTime", "requeued is held for two minutes", False),
        ("JobHeldUser", "scontrol release 5", True),
        ("launch failed requeued held", "ask an administrator about that node", True),
        ("launch_failed_requeued_held", "ask an administrator about that node", True),
        ("PartitionTimeLimit", "lower the stage's time", True),
        ("(ReqNodeNotAvail, UnavailableNodes:n[1-2])", "scontrol show reservation (now: n[1-2])", False),
        ("QOSMaxWallDurationPerJobLimit", "would wait for ever", True),
        ("QOSMaxGRESPerUser", "a limit of the QOS or account is reached", False),
        ("AssocGrpGRES", "a limit of the QOS or account is reached", False),
        ("MaxCpuPerAccount", "a limit of the QOS or account is reached", False),
        ("job requeued in held state", "scontrol release 5", True),
        ("job_requeued_in_held_state", "scontrol release 5", True),
        ("launch failure limit exceeded requeued held", "scontrol release 5", True),
        ("user env retrieval failed requeued held", "scontrol release 5", True),
        ("something new requeued held", "scontrol release 5", True),
        ("SomethingNew", "Slurm says SomethingNew", False),
        ("None", "about to be looked at", False),
    ],
)  # fmt: skip
def test_reasons_are_said_in_plain_words(reason: str, words: str, stuck: bool) -> None:
    job = SlurmJob("5", "pending", "squeue", reason)
    assert words in job.explain()
    assert job.stuck is stuck
    assert explain_reason(reason).stuck is stuck


def test_a_job_that_is_held_after_a_requeue_is_seen(fake: Fake) -> None:
    fake("squeue", squeue_of(row("5", "REQUEUE_HOLD", restarts=3, reason="launch failed requeued held")))
    job = SLURM.jobs(["5"])["5"]
    assert (job.state, job.restarts, job.stuck, job.ended) == ("requeue_hold", 3, True, False)
    assert "scontrol release 5" in job.explain()


def test_a_requeue_after_a_node_failure_is_not_the_end(fake: Fake) -> None:
    fake("squeue", squeue_of(row("5", "PENDING", restarts=1, reason="BeginTime")))
    assert not SLURM.jobs(["5"])["5"].ended


def test_exit_codes_are_those_of_wait_or_pairs() -> None:
    texts = {"1792": (7, 0), "9": (0, 9), "7:0": (7, 0), "0:15": (0, 15), "0": (0, 0), "": (0, 0)}
    for text, expected in texts.items():
        ((_, job),) = from_squeue(squeue_list([row("1", "FAILED", code=text)]))
        assert (job.exit_code, job.signal) == expected


# Nodes

LISTS = {
    "gpu[001-003,007]": "gpu001 gpu002 gpu003 gpu007",
    "a-b[9-11]": "a-b9 a-b10 a-b11",
    "n1,m[2-3]": "n1 m2 m3",
    "r[1-2]n[01-02]": "r1n01 r1n02 r2n01 r2n02",
    "login-1": "login-1",
    "x[3]": "x3",
    "slurm-worker-0": "slurm-worker-0",
}
BROKEN = [
    "n[1-",
    "",
    " ",
    "n[",
    "n]",
    "n[]",
    "n[3-1]",
    "n[a]",
    "n[1-2",
    "n1,,n2",
    "n[0-99999999]",
    "n[[1]]",
    "-n",
    "$(x)",
    "n 1",
]


@pytest.mark.parametrize("text", LISTS)
def test_node_lists_without_slurm(fake: Fake, text: str) -> None:
    assert SLURM.hostnames(text) == LISTS[text].split()  # scontrol fails here


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="no Slurm is installed")
@pytest.mark.parametrize("text", LISTS)
def test_ours_is_scontrols_own(tmp_path: Path, text: str) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=n1\n")
    result = subprocess.run(
        ["scontrol", "show", "hostnames", text],
        capture_output=True, text=True, env={**os.environ, "SLURM_CONF": str(conf)}, check=True,
    )  # fmt: skip
    assert result.stdout.split() == LISTS[text].split()


@pytest.mark.parametrize("text", BROKEN)
def test_broken_lists_are_refused_whatever_scontrol_makes_of_them(fake: Fake, text: str) -> None:
    fake("scontrol", "echo 'n]'")
    with pytest.raises(UserError, match="is not a list of nodes"):
        SLURM.hostnames(text)
    with pytest.raises(UserError):
        expand_node_list(text)


def test_scontrol_has_the_last_word_on_names(fake: Fake) -> None:
    fake("scontrol", "printf 'n1\\nn2\\n'")
    assert SLURM.hostnames("n[1-2]") == ["n1", "n2"]
    assert calls("scontrol") == ["show hostnames n[1-2]"]


def test_a_thousand_nodes_are_named_in_few_words() -> None:
    names = [f"rack{number}-gpu{number * 3}" for number in range(1000)]
    text = ",".join(names)
    assert few_nodes("n[1-1000]") == "n[1-1000]"
    assert few_nodes(text) == few_nodes(names) == f"{', '.join(names[:6])} and 994 more"
    assert few_nodes(["n1", "n2"]) == "n1, n2"
    assert len(few_nodes(text[:-1] + "[")) <= 101
    jobs = [
        SlurmJob("5", "running", "squeue", nodes=text),
        SlurmJob("5", "pending", "squeue", reason=f"ReqNodeNotAvail, UnavailableNodes:{text}"),
        SlurmJob("5", "pending", "squeue", reason="Resources", excluded=text),
        SlurmJob("5", "pending", "squeue", reason=f"New reason with {text}"),
    ]
    assert max(len(job.explain()) for job in jobs) < 400
    error = SlurmError(["sbatch", f"--exclude={text}", "-O", COLUMNS], "<html>" * 10_000)
    assert len(str(error)) < 6000
    assert all(letter.isprintable() or letter == "\n" for letter in str(error))


LOG = """\
srun: error: Task launch for StepId=12.0 failed on node n3: Invalid job credential
srun: error: Application launch failed: Invalid job credential
0: srun: error: Task launch for StepId=12.0 failed on node gpu-rack1-7: Communication connection failure
srun: error: Node failure on m[1-2]
srun: error: Nodes k1,k3 are still not ready
srun: error: slurm_receive_msgs: [[c4.site]:6818] failed: Socket timed out on send/recv operation
srun: error: Task launch for StepId=12.0 failed on node n3: said twice
srun: error: n9: task 3: Exited with exit code 1
srun: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***
srun: error: Node failure on [torn
a rank says: srun: error: Node failure on x1
"""


def test_nodes_that_slurm_names_are_read_from_a_log() -> None:
    assert nodes_named(LOG) == [
        ("n3", "Invalid job credential"), ("gpu-rack1-7", "Communication connection failure"),
        ("m1", "node failure"), ("m2", "node failure"), ("k1", "still not ready"), ("k3", "still not ready"),
        ("c4.site", "Socket timed out on send/recv operation"),
    ]  # fmt: skip
    assert nodes_named("") == []


# The cluster, and changes


def test_partitions_and_limits(fake: Fake) -> None:
    fake("sinfo", "echo 'main*|up|1-00:00:00|3|8+|8000+|gpu:h100:4(S:0-1)'; echo 'old|inact|infinite|1|4|100|(null)'")
    fake(
        "scontrol", "printf 'Configuration data\\nMaxArraySize            = 1001\\nKillWait                = 30 sec\\n'"
    )
    main, old = SLURM.partitions()
    assert main == ("main", True, True, "1-00:00:00", 3, 8, 8000, "gpu:h100:4(S:0-1)")
    assert (old.is_up, old.gres, old.time_limit) == (False, "", "infinite")


def test_changes_are_the_words_that_slurm_wants(fake: Fake) -> None:
    fake("scontrol", "")
    fake("scancel", "echo 'scancel: error: Kill job error on job id 2: Invalid job id specified' >&2; exit 1")
    SLURM.requeue("1")
    SLURM.update("1", ExcNodeList="n[1-2]", Dependency="afterok:3")
    SLURM.cancel(["3", "2", "1"])
    SLURM.cancel([])
    assert calls("scontrol") == [
        "update JobId=1 Requeue=1",
        "requeue 1",
        "update JobId=1 ExcNodeList=n[1-2] Dependency=afterok:3",
    ]
    assert calls("scancel") == ["3 2 1"]


def test_a_cancel_that_did_not_happen_is_said(fake: Fake) -> None:
    fake("scancel", "echo 'scancel: error: Kill job error on job id 2: Access/permission denied' >&2; exit 1")
    with pytest.raises(SlurmError, match="permission denied"):
        SLURM.cancel(["2"])


def test_a_sites_modules_reach_a_job_and_a_strangers_words_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {
        "BASH_FUNC_module%%": "() { :\n}",
        "_ModuleTable001_": "x",
        "LMOD_DIR": "/sw",
        "LC_TIME": "C",
        "SLURM_CONF": "/x",
    }
    for name, value in {**kept, "CLOUD_KEY": "canary", "SBATCH_EXPORT": "ALL", "NAMED": "yes"}.items():
        monkeypatch.setenv(name, value)
    found = job_environment(["NAMED"])
    assert {**kept, "NAMED": "yes"}.items() <= found.items()
    assert not {"CLOUD_KEY", "SBATCH_EXPORT"} & found.keys()
    assert "NAMED" not in job_environment()
