"""The chain cannot hurt itself: second starts, bad moments, answers that are lost; each Run ends as its undisturbed twin."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from driven_chain import COMMANDS, STEPS, DrivenChain, make_twin, write_corpus
from private_slurm import PrivateSlurm

SLOW = 0.25  # seconds a step: 15 s of training
SOON = 60  # seconds in which an attempt that may not work has left
CANCELS = {"PreemptMode": "CANCEL", "MinJobAge": "2"}
Note = Callable[[str], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("itself")
    write_corpus(folder / "corpus")
    return folder


@pytest.fixture(scope="module")
def twin(slurm: PrivateSlurm, folder: Path) -> DrivenChain:
    return make_twin(slurm, folder)


@pytest.fixture
def chain(slurm: PrivateSlurm, folder: Path, request: pytest.FixtureRequest) -> DrivenChain:
    return DrivenChain(slurm, folder, name_of(request))


def name_of(request: pytest.FixtureRequest) -> str:
    name = request.node.name.removeprefix("test_").replace("[", "-").replace("]", "")
    return str(name[:50].strip("-_"))


def leaves(chain: DrivenChain, job: str, running: str) -> None:
    """Watch a Job that may not work while `running` trains: it waits, or it is gone again soon after it began."""
    since, seen = time.monotonic(), ""
    while time.monotonic() - since < SOON:
        seen = chain.state_of(job)
        assert chain.state_of(running) == "RUNNING", chain.logs()
        if seen != "RUNNING" and (seen != "PENDING" or time.monotonic() - since > 12):  # a requeued one is held 7 s
            return
        time.sleep(0.5)
    raise AssertionError(f"job {job} is {seen} for {SOON} s beside job {running}\n{chain.logs()}")


# 1: a second start


def test_a_waiting_segment_is_cancelled(chain: DrivenChain, twin: DrivenChain) -> None:
    chain.submit("pretrain.segments=3", slow=SLOW)
    chain.wait_for_step(3)
    job = chain.running()
    chain.slurm.run("scancel", chain.waiting())
    chain.finish()
    assert chain.training() == [(job, 0)]
    assert not chain.take_overs((job, 0))
    assert chain.result() == twin.result()


def test_a_person_starts_the_script_by_hand(chain: DrivenChain, twin: DrivenChain) -> None:
    chain.submit(slow=SLOW)
    chain.wait_for_step(3)
    job = chain.running()
    leaves(chain, chain.sbatch_by_hand(), job)
    chain.finish()
    assert chain.training() == [(job, 0)]
    assert not chain.take_overs((job, 0))
    assert chain.result() == twin.result()


def test_a_finished_segment_is_requeued(chain: DrivenChain, twin: DrivenChain) -> None:
    chain.submit("pretrain.segments=3", slow=SLOW)
    chain.wait_for_step(8)
    first = chain.running()
    chain.slurm.run("scontrol", "update", f"JobId={first}", "Requeue=1")  # Slurm would refuse to requeue it
    chain.warn(first)
    chain.wait_for("a second attempt", lambda: len(chain.training()) > 1, 90)
    second = chain.training()[1]
    if second[0] != first:
        chain.slurm.run("scontrol", "requeue", first)
        leaves(chain, first, second[0])
    chain.finish()
    assert chain.training() == [(first, 0), second]
    assert not chain.take_overs((first, 0), second)
    assert chain.result() == twin.result()


def test_an_orphan_of_a_lost_answer(chain: DrivenChain, twin: DrivenChain) -> None:
    with chain.nodes_are_busy():
        chain.submit(slow=SLOW)
        job = chain.waiting()
        (queued,) = (found for found in chain.queue("pretrain") if found.job_id == job)
        dependency = queued.dependency.replace("(unfulfilled)", "").replace("(null)", "")
        words = [f"--job-name={queued.name}", f"--comment={queued.comment}", "--mem=500M"]
        orphan = chain.sbatch_by_hand(*words, *[f"--dependency={dependency}"] * bool(dependency))
    chain.wait_for_step(3)
    other = orphan if (working := chain.running()) == job else job
    leaves(chain, other, working)
    chain.finish()
    assert chain.training() == [(working, 0)]
    assert not chain.take_overs((working, 0))
    assert chain.result() == twin.result()


# 2: the same command at every moment


def ask_again(chain: DrivenChain) -> None:
    """Give both commands again; none of what they add may start beside what runs, and nothing is missing."""
    for words in (["submit", chain.config, "--cluster", chain.cluster], ["resume", chain.run.root]):
        done = subprocess.run(
            chain.command(*words, "pretrain.segments=3"),
            env=chain.environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        for stage in ("tokenize", "pretrain", "evaluate", "inference"):
            jobs = chain.alive(stage)
            free = [job for job in jobs if job.waits and job.dependency in ("", "(null)")]
            assert sum(job.state == "RUNNING" for job in jobs) + len(free) <= 1, jobs
        scored, drawn = chain.run.scores(STEPS) / "bits_per_byte.json", chain.run.samples(STEPS)
        assert len(chain.alive("evaluate")) == 1 or scored.is_file(), chain.queue()
        assert len(chain.alive("inference")) == 1 or drawn.is_file(), chain.queue()


def test_submit_and_resume_at_every_moment(chain: DrivenChain, twin: DrivenChain) -> None:
    chain.on("pipeline.stages.tokenize", "sleep 12")
    chain.submit("pretrain.segments=3", slow=SLOW)
    chain.running("tokenize")
    ask_again(chain)
    chain.wait_for_step(1)
    ask_again(chain)  # the first Segment trains
    first = chain.running()
    chain.warn(first)
    ask_again(chain)  # it ends, or has just ended
    chain.wait_for("the second attempt", lambda: len(chain.training()) > 1, 90)
    ask_again(chain)
    chain.on("pipeline.stages.evaluate", "sleep 12")
    chain.wait_for_step(STEPS)
    chain.wait_for("evaluate", lambda: any(job.state == "RUNNING" for job in chain.queue("evaluate")), 60)
    ask_again(chain)
    chain.finish()
    before = chain.queue()
    ask_again(chain)
    assert chain.queue() == before
    assert len(chain.training()) == 2
    assert not chain.take_overs(*chain.training())
    assert [job.state for job in chain.queue("evaluate")].count("COMPLETED") == 1
    assert [job.state for job in chain.queue("inference")].count("COMPLETED") == 1
    assert chain.result() == twin.result()


# 3: preemption that cancels, and a Slurm that forgets


def test_preemption_by_cancellation(root: Path, folder: Path, twin: DrivenChain) -> None:
    with PrivateSlurm(root, 2, settings=CANCELS) as slurm:
        chain = DrivenChain(slurm, folder, "preempted")
        chain.submit(slow=SLOW)
        chain.wait_for_step(12)
        job = chain.running()
        slurm.submit("sleep 5", "--partition=high", "--nodes=2", "--exclusive")
        chain.wait_for("preemption", lambda: chain.running("pretrain") != job, 60)
        chain.finish()
        assert len(chain.training()) == 2
        assert chain.samples() == [STEPS]
        assert chain.result() == twin.result()


def test_a_forgotten_edge_starts_nothing_on_half_a_model(root: Path, folder: Path, twin: DrivenChain) -> None:
    with PrivateSlurm(root, 1, settings=CANCELS) as slurm:
        chain = DrivenChain(slurm, folder, "forgotten")
        chain.submit(slow=SLOW)
        chain.wait_for_step(12)
        held = [job.job_id for stage in ("evaluate", "inference") for job in chain.queue(stage)]
        slurm.run("scontrol", "hold", *held)
        for job in chain.alive("pretrain"):
            if job.waits:
                slurm.run("scancel", job.job_id)
        chain.kill(chain.running())
        chain.wait_for("squeue to forget", lambda: not chain.queue("pretrain"), 60)
        for job_id in held:
            slurm.run("scontrol", "release", job_id, check=False)
        time.sleep(3)
        chain.wait_for("their end", lambda: all(job.waits for job in chain.alive()), 60)
        assert chain.samples() == []
        chain.verb("resume", chain.run.root)
        chain.finish()
        assert chain.samples() == [STEPS]
        assert chain.result() == twin.result()


# 4: ends that are not polite


def test_a_save_slower_than_the_lead(chain: DrivenChain, twin: DrivenChain) -> None:
    with chain.nodes_are_busy():
        chain.submit(slow=SLOW)
        job = chain.waiting()
        chain.inject("rank=0,step=20,do=slow_save,seconds=300", job)
    chain.wait_for_step(19)
    chain.slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    chain.wait_for("the time limit", lambda: chain.state_of(job) not in ("RUNNING", "COMPLETING"), 120)
    chain.finish()
    assert len(chain.training()) == 2
    assert chain.result() == twin.result()


@pytest.mark.parametrize(("seconds", "end"), [(25, "warned"), (60, "warned"), (60, "complete")])
def test_the_controller_is_away_around_an_end(chain: DrivenChain, twin: DrivenChain, seconds: int, end: str) -> None:
    chain.submit(slow=SLOW)
    chain.wait_for_step(12 if end == "warned" else STEPS - 8)
    job = chain.running()
    chain.slurm.stop_controller()
    if end == "warned":
        chain.warn_without_controller(job)
    else:
        chain.wait_for_step(STEPS)
    chain.controller_away(seconds)
    chain.finish(240)  # Slurm's own step daemon tells of its end again only after 60 s
    assert len(chain.training()) == (2 if end == "warned" else 1)
    assert chain.result() == twin.result()


def test_a_disk_that_is_full_at_the_beginning(chain: DrivenChain, twin: DrivenChain) -> None:
    mark = chain.on("pipeline.host.jobscript begin * pretrain", "ulimit -f 0", once=True)  # each write is an OSError
    chain.submit()
    chain.finish()
    assert mark.exists()
    assert chain.result() == twin.result()


def test_the_script_ends_in_its_middle(chain: DrivenChain, twin: DrivenChain) -> None:
    with chain.nodes_are_busy():
        chain.submit()
        mark = chain.exit_in_the_middle()
    chain.finish()
    assert mark.exists()
    assert len(chain.training()) == 1
    assert chain.result() == twin.result()


def test_scontrol_fails_once_for_the_nodes(chain: DrivenChain, twin: DrivenChain) -> None:
    chain.stub("scontrol", 'if [[ "$*" == *show*node* && ! -e $0.failed ]]; then touch $0.failed; exit 1; fi')
    chain.submit()
    chain.finish()
    assert len(chain.training()) == 1
    assert chain.result() == twin.result()


# 5: nodes that know srun alone


def test_nodes_have_no_command_of_slurm_but_srun(slurm: PrivateSlurm, folder: Path, note: Note) -> None:
    keys = ("pretrain.nproc_per_node=2", "preflight.enabled=true", "pretrain.micro_batch_size=1")
    twin = make_twin(slurm, folder, "twin-of-two", overrides=keys)
    chain = DrivenChain(slurm, folder, "srun-alone", cluster="nodes_may_submit: false\nenv: {GLOO_SOCKET_IFNAME: lo}\n")
    chain.cluster.write_text(chain.cluster.read_text().replace("launcher: srun", "launcher: torchrun"))
    calls = [chain.stub(name, "exit 127") for name in COMMANDS]
    words = ("pretrain.nproc_per_node=1", "pretrain.nodes=2", *keys[1:])
    chain.submit("pretrain.segments=3", *words, slow=SLOW)
    chain.wait_for_step(8)
    chain.warn(chain.running())
    chain.finish(300)  # two preflights on two nodes
    assert len({job for job, _ in chain.training()}) == 2
    assert {path.name: path.read_text() for path in calls if path.exists()} == {}
    assert chain.result() == twin.result()


# 6: what comes before, and what comes after


@pytest.mark.parametrize("kill", [True, False])
@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_without_tokens_no_segment_starts(slurm: PrivateSlurm, folder: Path, how: str, kill: bool) -> None:
    (folder / "empty").mkdir(exist_ok=True)
    (folder / "empty" / "one.txt").write_text("too little")
    data = f"{folder}/empty/*.txt" if how == "failed" else ""
    cluster = "" if kill else "kill_on_invalid_dep: false\n"
    chain = DrivenChain(slurm, folder, f"untokenized-{how}-{kill}".lower(), data=data, cluster=cluster)
    with chain.nodes_are_busy():
        chain.submit("pretrain.segments=3")
        tokenize = chain.waiting("tokenize")
        if how == "cancelled":
            slurm.run("scancel", tokenize)
    chain.wait_for("the end of tokenize", lambda: chain.state_of(tokenize) in ("CANCELLED", "FAILED"), 60)
    if kill or how == "failed":
        chain.wait_for("an empty queue", lambda: not chain.alive(), 60)
    else:  # nobody is there to clean up: neither Slurm nor a process of the chain
        time.sleep(10)
    assert chain.training() == []
    assert [path.name for path in chain.run.logs.glob("pretrain-*.0.log")] == []
    assert chain.samples() == []


def test_an_update_that_times_out_at_an_early_end(chain: DrivenChain, twin: DrivenChain) -> None:
    answer = "slurm_update error: Socket timed out on send/recv operation"
    chain.stub("scontrol", f'if [[ "$*" == *update* ]]; then sleep 1; echo "{answer}" >&2; exit 1; fi')
    chain.submit("pretrain.segments=3")
    chain.finish()
    assert len(chain.training()) == 1
    assert chain.result() == twin.result()


# 7: nodes that see less than others


def test_a_node_that_does_not_see_the_run(chain: DrivenChain, twin: DrivenChain) -> None:
    chain.submit(slow=SLOW)
    chain.wait_for_step(3)
    job, successor = chain.running(), chain.waiting()
    node = chain.slurm.job(job)["NodeList"]
    blind, *others = (name for name in chain.slurm.nodes if name != node)
    chain.slurm.on_host(blind, "mount", "-t", "tmpfs", "none", chain.run.root.parent)
    try:
        for name in (node, *others):
            chain.slurm.run("scontrol", "update", f"NodeName={name}", "State=DRAIN", "Reason=test")
        chain.warn(job)
        chain.wait_for("a start where the Run is not seen", lambda: chain.slurm.job(successor)["NodeList"] == blind, 60)
        chain.wait_for("the node to be left", lambda: chain.slurm.job(successor)["ExcNodeList"] == blind, 90)
    finally:
        for name in (node, *others):
            chain.slurm.run("scontrol", "update", f"NodeName={name}", "State=RESUME")
    chain.finish()
    chain.slurm.on_host(blind, "umount", "--lazy", chain.run.root.parent)
    assert chain.training() == [(job, 0), (successor, 1)]
    assert chain.result() == twin.result()


def test_a_prolog_that_fails_where_the_next_segment_starts(root: Path, folder: Path, twin: DrivenChain) -> None:
    prolog, bad = folder / "prolog.sh", folder / "bad"
    prolog.write_text(f'#!/bin/sh\n! grep -qx "$SLURMD_NODENAME" {bad} 2>/dev/null\n')
    prolog.chmod(0o755)
    with PrivateSlurm(root, 3, settings={"Prolog": str(prolog)}) as slurm:
        chain = DrivenChain(slurm, folder, "prolog")
        chain.submit(slow=SLOW)
        chain.wait_for_step(3)
        job, successor = chain.running(), chain.waiting()
        bad.write_text("\n".join(slurm.nodes[:2]) + "\n")
        for name in slurm.nodes[1:]:
            slurm.run("scontrol", "update", f"NodeName={name}", "State=DRAIN", "Reason=test")
        chain.warn(job)
        chain.wait_for("the prolog to fail", lambda: chain.state_of(successor) == "CANCELLED", 60)
        slurm.run("scontrol", "update", f"NodeName={slurm.nodes[2]}", "State=RESUME")
        chain.finish(240)
        third = chain.training()[-1]
        assert chain.training() == [(job, 0), third]
        assert third[0] != successor
        assert chain.result() == twin.result()
