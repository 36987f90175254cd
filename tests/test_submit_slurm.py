"""A chain is submitted once, whatever happens in between; a small Slurm on PATH keeps the queue."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import fake_slurm
import pytest
from conftest import environment
from slurm_site import CLUSTER, NO_SUBMIT, Pipeline, Site

from pipeline.files import read_json, write_json
from pipeline.run.folder import Run
from pipeline.run.job_ledger import read_ledger
from pipeline.run.owner import claim_path
from pipeline.run.records import JobRecord


@pytest.fixture
def site(tmp_path: Path, micro: Path, pipeline: Pipeline) -> Site:
    return Site(tmp_path, micro, pipeline)


def ledger(run: Run) -> list[JobRecord]:
    return read_ledger(run)


def test_one_command_submits_the_chain_with_its_edges(site: Site) -> None:
    result = site.submit("pretrain.segments=3")
    assert result.returncode == 0, result.stderr
    jobs = site.by_name()
    assert list(jobs) == ["tokenize", "pretrain", "evaluate", "inference"]  # each Segment queues the next
    ids = {name: job["id"] for name, job in jobs.items()}
    assert [job["dependency"] for job in jobs.values()] == [
        "", f"afterok:{ids['tokenize']},singleton", f"afterany:{ids['pretrain']}", f"afterany:{ids['pretrain']}",
    ]  # fmt: skip
    assert all(job["kill"] for job in jobs.values() if job["dependency"])
    words = jobs["pretrain"]["words"]
    assert {"--gres=gpu:h100:1", "--partition=gpu", "--account=lm", "--nodes=1", "--time=0-01:00:00"} <= set(words)
    assert "--partition=cpu" in jobs["tokenize"]["words"]
    assert not any("gres" in word for word in jobs["tokenize"]["words"])
    assert words[-2:] == [str(site.run.snapshot / "sbatch" / "pretrain.sbatch"), str(site.run.root)]
    assert [(record.stage, record.job_id) for record in ledger(site.run)] == list(ids.items())
    assert [record.token for record in ledger(site.run)] == [job["comment"] for job in jobs.values()]


def test_where_nodes_may_not_submit_all_segments_are_queued_one_behind_the_other(site: Site) -> None:
    site.cluster.write_text(NO_SUBMIT)
    assert site.submit("pretrain.segments=3").returncode == 0
    tokenize, (one, two, three) = site.by_name()["tokenize"]["id"], site.ids("pretrain")
    assert [site.queue[job_id]["dependency"] for job_id in (one, two, three)] == [
        f"afterok:{tokenize},singleton", f"afterok:{tokenize},afterany:{one},singleton",
        f"afterok:{tokenize},afterany:{two},singleton",
    ]  # fmt: skip
    assert len({site.queue[job_id]["name"] for job_id in (one, two, three)}) == 1  # singleton looks at the name
    assert [site.by_name()[name]["dependency"] for name in ("evaluate", "inference")] == [f"afterany:{three}"] * 2


def test_a_segment_cancelled_before_its_turn_is_queued_again_behind_the_others(site: Site) -> None:
    site.cluster.write_text(NO_SUBMIT)
    site.submit("pretrain.segments=3")
    _, two, three = site.ids("pretrain")
    site.set_id(two, "CANCELLED")
    assert site.submit("pretrain.segments=3").returncode == 0
    *_, again = site.ids("pretrain")
    assert len(site.ids("pretrain")) == 4
    assert site.queue[again]["dependency"] == f"afterok:{site.by_name()['tokenize']['id']},afterany:{three},singleton"
    assert site.by_name()["evaluate"]["dependency"] == f"afterany:{again}"


def test_a_second_call_submits_nothing(site: Site) -> None:
    site.submit()
    before = site.queue
    again = site.submit()
    assert again.returncode == 0, again.stderr
    assert site.queue == before
    assert "pending already" in again.stderr


@pytest.mark.parametrize("text", [CLUSTER, NO_SUBMIT], ids=["rolling", "static"])
@pytest.mark.parametrize("calls", [1, 2, 3, 4])
def test_submit_killed_after_any_sbatch_is_completed_by_the_next_without_doubles(
    site: Site, calls: int, text: str
) -> None:
    site.cluster.write_text(text)
    bomb = site.folder / "die_after"
    bomb.write_text(str(calls))
    assert site.submit().returncode == -9
    assert len(site.queue) == calls
    bomb.unlink()
    again = site.submit()
    assert again.returncode == 0, again.stderr
    assert list(site.by_name()) == ["tokenize", "pretrain", "evaluate", "inference"]
    assert len(site.queue) == 4
    assert [record.job_id for record in ledger(site.run)] == list(site.queue)
    assert site.by_name()["pretrain"]["dependency"] == f"afterok:{site.by_name()['tokenize']['id']},singleton"


def test_submit_killed_between_segments_is_completed_by_the_next(site: Site) -> None:
    site.cluster.write_text(NO_SUBMIT)
    bomb = site.folder / "die_after"
    bomb.write_text("3")
    assert site.submit("pretrain.segments=3").returncode == -9
    bomb.unlink()
    assert site.submit("pretrain.segments=3").returncode == 0
    assert [len(site.ids(kind)) for kind in ("tokenize", "pretrain", "evaluate", "inference")] == [1, 3, 1, 1]


def test_a_failed_tokenize_lets_no_segment_start_and_resume_submits_what_is_missing(site: Site) -> None:
    site.submit()
    site.set("tokenize", "FAILED")
    assert [job["state"] for job in site.queue.values()] == ["FAILED", "CANCELLED", "PENDING", "PENDING"]
    status = site.verb("status", site.run.root)
    assert "2 Jobs of the chain are not submitted: tokenize, pretrain" in status.stdout
    resumed = site.verb("resume", site.run.root)
    assert resumed.returncode == 0, resumed.stderr
    live = [name for name, job in site.by_name().items() if job["state"] == "PENDING"]
    assert live == ["tokenize", "pretrain", "evaluate", "inference"]
    assert len(site.queue) == 6
    assert_whole(site)


def assert_whole(site: Site) -> None:
    """Each Job waits for the newest of the Stage before it."""
    jobs = site.by_name()
    assert jobs["pretrain"]["dependency"] == f"afterok:{jobs['tokenize']['id']},singleton"
    for name in ("evaluate", "inference"):
        assert jobs[name]["dependency"] == f"afterany:{jobs['pretrain']['id']}"


def test_a_run_whose_chain_has_failed_is_failed(site: Site) -> None:
    site.submit()
    for name in ("tokenize", "evaluate", "inference"):
        site.set(name, "FAILED")
    status = site.verb("status", site.run.root)
    assert status.returncode == 1
    assert "failed" in status.stdout


def test_where_the_site_kills_no_job_in_vain_resume_lets_it_wait_for_the_new_one(site: Site) -> None:
    site.cluster.write_text(CLUSTER + "kill_on_invalid_dep: false\n")
    site.submit()
    assert not any(job["kill"] for job in site.queue.values())
    site.set("tokenize", "FAILED")
    assert site.by_name()["pretrain"]["reason"] == "DependencyNeverSatisfied"
    site.verb("resume", site.run.root)
    assert [len(site.ids(kind)) for kind in ("tokenize", "pretrain", "evaluate", "inference")] == [2, 1, 1, 1]
    assert_whole(site)


def test_a_later_job_of_an_old_chain_waits_for_the_new_one(site: Site) -> None:
    site.cluster.write_text(NO_SUBMIT)
    site.submit("pretrain.segments=2")
    first, second = site.ids("pretrain")
    site.set("tokenize", "RUNNING")
    site.verb("cancel", site.run.root)
    assert {job["state"] for job in site.queue.values()} == {"CANCELLED"}
    site.verb("resume", site.run.root)
    *_, third, fourth = site.ids("pretrain")
    assert {first, second}.isdisjoint({third, fourth})
    assert f"afterany:{third}" in site.queue[fourth]["dependency"]


def test_a_segment_that_works_gets_its_successor_and_the_rest_waits_for_that(site: Site) -> None:
    site.submit()
    site.tokenized()
    site.set("pretrain", "RUNNING", nodes="n1")
    (working,) = site.ids("pretrain")
    assert "1 Job of the chain is not submitted: pretrain after job " in site.verb("status", site.run.root).stdout
    told = site.submit()
    assert told.returncode == 0, told.stderr
    _, successor = site.ids("pretrain")
    assert f"pretrain  submitted as job {successor}, afterany:{working},singleton" in told.stderr
    assert site.queue[successor]["dependency"] == f"afterany:{working},singleton"
    assert {site.by_name()[name]["dependency"] for name in ("evaluate", "inference")} == {f"afterany:{successor}"}
    found = json.loads(site.verb("status", site.run.root, "--json").stdout)
    assert found["not_submitted"] == []
    before = site.queue
    site.submit()
    assert site.queue == before


def test_of_two_that_wait_behind_one_that_works_one_stays(site: Site) -> None:
    site.submit()
    site.tokenized()
    site.set("pretrain", "RUNNING", nodes="n1")
    site.submit()
    _, successor = site.ids("pretrain")
    (path,) = [path for path in site.run.job_records.iterdir() if read_json(path)["job_id"] == successor]
    path.unlink()  # its entry is lost; the queue still knows it
    site.submit()
    assert site.ids("pretrain")[1:] == [successor]
    assert [record.job_id for record in ledger(site.run)].count(successor) == 1


def test_refused_options_are_told_with_slurms_words_and_nothing_is_lost(site: Site) -> None:
    (site.folder / "refuse").write_text("sbatch: error: invalid partition specified: gpu")
    refused = site.submit()
    assert refused.returncode == 2
    assert "invalid partition specified: gpu" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert "Queued already" not in refused.stderr  # nothing is
    (site.folder / "refuse").unlink()
    assert site.submit().returncode == 0
    assert len(site.queue) == 4


FULL = "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
REFUSED = "sbatch: error: Batch job submission failed: Invalid partition name specified"


@pytest.mark.parametrize(("said", "code"), [(FULL, 3), (REFUSED, 2)], ids=["full", "refused"])
def test_a_submission_that_breaks_half_way_says_what_is_queued_and_how_to_take_it_back(
    site: Site, said: str, code: int
) -> None:
    (site.folder / "take").write_text("2")
    (site.folder / "refuse_later").write_text(said)
    broken = site.submit()
    assert broken.returncode == code, broken.stderr
    assert said.splitlines()[-1] in broken.stderr
    tokenize, pretrain = site.queue
    assert f"Queued already: tokenize {tokenize}, pretrain {pretrain}" in broken.stderr
    assert "-m pipeline cancel " in broken.stderr
    found = json.loads(site.verb("status", site.run.root, "--json").stdout)
    assert found["not_submitted"] == ["evaluate", "inference"]
    assert "2 Jobs of the chain are not submitted: evaluate, inference" in site.verb("status", site.run.root).stdout
    (site.folder / "take").unlink()
    assert site.submit().returncode == 0
    assert_whole(site)
    assert site.verb("cancel", site.run.root).returncode == 0
    assert {job["state"] for job in site.queue.values()} == {"CANCELLED"}


def test_dry_run_and_test_queue_nothing(site: Site) -> None:
    dry = site.submit("--dry-run")
    assert "sbatch --parsable" in dry.stdout
    assert "'--dependency=afterok:<tokenize>,singleton'" in dry.stdout
    assert site.queue == {}
    assert not site.run.root.exists()
    tested = site.submit("--test")
    assert tested.returncode == 0, tested.stderr
    assert tested.stdout.count("to start at") == 4
    assert site.queue == {}


def test_dry_run_is_the_same_inside_of_a_job(site: Site) -> None:
    outside = site.submit("--dry-run").stdout
    inside = site.submit(
        "--dry-run", SLURM_JOB_ID="7", SLURM_MEM_PER_CPU="2000", SBATCH_PARTITION="debug", SLURM_EXPORT_ENV="NONE"
    )
    assert inside.stdout == outside


def test_cost_above_the_limit_needs_a_yes(site: Site) -> None:
    site.cluster.write_text(CLUSTER + "confirm_gpu_hours: 1\n")
    refused = site.submit("pretrain.time=10:00:00")
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert site.queue == {}
    assert site.submit("pretrain.time=10:00:00", "--yes").returncode == 0


def test_stop_cancels_what_waits_and_leaves_a_word_for_what_runs(site: Site) -> None:
    site.submit()
    site.set("tokenize", "RUNNING", nodes="n1")
    stopped = site.verb("stop", site.run.root)
    assert stopped.returncode == 0, stopped.stderr
    assert site.run.stop.is_file()
    assert [job["state"] for job in site.queue.values()] == ["RUNNING", "CANCELLED", "CANCELLED", "CANCELLED"]
    assert "saves and stops at its next step" in stopped.stdout
    site.set("tokenize", "COMPLETED")
    assert "none of its Jobs runs" in site.verb("stop", site.run.root).stdout


def test_verbs_tell_a_program_what_status_tells(site: Site) -> None:
    submitted = json.loads(site.submit("--json").stdout)
    assert [job["state"] for job in submitted["jobs"]] == ["pending"] * 4
    stopped = site.verb("stop", site.run.root, "--json")
    assert json.loads(stopped.stdout)["state"] == "stopped"
    assert "Cancelled what waited" in stopped.stderr
    assert json.loads(site.verb("resume", site.run.root, "--json").stdout)["state"] == "pending"


def test_a_reader_that_has_seen_enough_leaves_no_chain_half_submitted(site: Site) -> None:
    line = f"{sys.executable} -m pipeline submit {site.micro} --cluster {site.cluster} 2>&1 | head -n 1"
    folder = site.run.root.parent.parent
    subprocess.run(["bash", "-c", line], env=environment(**site.changes), cwd=folder, check=True, timeout=60)
    assert len(site.queue) == 4


def test_cancel_takes_dependants_first(site: Site) -> None:
    site.submit()
    site.verb("cancel", site.run.root)
    *_, words = [json.loads(line) for line in (site.folder / "scancel.log").read_text().splitlines()]
    assert words == [str(number) for number in (104, 103, 102, 101)]


def test_a_job_that_has_the_id_of_one_of_ours_is_not_cancelled(site: Site) -> None:
    """A controller that has lost its state gives the same ids again, to anybody."""
    site.submit()
    strangers = {job_id: job | {"comment": "pipeline:ffffffffffff:x.000001"} for job_id, job in site.queue.items()}
    fake_slurm.write(site.folder, strangers)
    refused = site.verb("cancel", site.run.root)
    assert refused.returncode == 3
    assert "none of its Jobs waits or runs" in refused.stderr
    site.verb("stop", site.run.root)
    assert site.queue == strangers


def test_status_says_what_the_queue_says(site: Site) -> None:
    site.submit()
    site.set("tokenize", "RUNNING", nodes="n1")
    found = json.loads(site.verb("status", site.run.root, "--json").stdout)
    assert found["state"] == "running"
    assert [(job["stage"], job["state"]) for job in found["jobs"]][:2] == [
        ("tokenize", "running"),
        ("pretrain", "pending"),
    ]
    assert "squeue" in found["source"]


def test_status_without_an_answer_is_unknown_never_wrong(site: Site) -> None:
    site.submit()
    for name in ("squeue", "scontrol", "sacct"):
        (site.folder / "bin" / name).write_text(
            "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1\n"
        )
    status = site.verb("status", site.run.root, "--json")
    assert status.returncode == 0, status.stderr
    assert json.loads(status.stdout)["state"] not in ("completed", "running")


def test_a_git_pull_under_a_queued_chain_changes_no_code(site: Site) -> None:
    site.submit()
    marker = site.run.snapshot / "pipeline" / "__init__.py"
    marker.write_text(marker.read_text() + "# older\n")
    site.submit()
    assert "# older" in marker.read_text()


def test_bad_nodes_are_left_out(site: Site) -> None:
    state = site.run.root.parent / ".ours"
    state.mkdir(parents=True)
    (state / "bad_nodes.jsonl").write_text(json.dumps({"node": "n7", "reason": "ECC", "until": 9e9}) + "\n")
    site.submit()
    assert all("--exclude=n7" in job["words"] for job in site.queue.values())


def test_gpus_beyond_a_node_are_refused_before_the_queue(site: Site) -> None:
    refused = site.submit("pretrain.nproc_per_node=16", "pretrain.global_batch_size=16", "pretrain.micro_batch_size=1")
    assert refused.returncode == 2
    assert "8 GPUs" in refused.stderr
    assert site.queue == {}


def test_shell_asks_for_what_training_gets(site: Site) -> None:
    site.submit("pretrain.nproc_per_node=2", "pretrain.micro_batch_size=1")
    srun = site.folder / "bin" / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"; echo "NCCL_DEBUG=$NCCL_DEBUG"\n')
    srun.chmod(0o755)
    said = site.verb("shell", site.run.root, "--time", "30").stdout.splitlines()
    assert {"--pty", "--nodes=1", "--time=30", "--gres=gpu:h100:2", "--partition=gpu"} <= set(said)
    assert said[-3:] == ["bash", "-i", "NCCL_DEBUG=WARN"]


def test_shell_on_a_run_of_this_machine_says_that_any_will_do(micro: Path, pipeline: Pipeline, tmp_path: Path) -> None:
    run = Run(tmp_path / "runs" / "micro")
    run.root.mkdir(parents=True)
    run.config.write_text(micro.read_text())
    refused = pipeline("shell", run.root)
    assert refused.returncode == 2
    assert "--cluster FILE" in refused.stderr


def test_an_image_or_a_mount_that_is_not_there_is_named_before_the_queue(site: Site, tmp_path: Path) -> None:
    site.cluster.write_text(CLUSTER + "image: nowhere/train.sqsh\n")
    refused = site.submit()
    assert refused.returncode == 3
    assert str(tmp_path / "nowhere" / "train.sqsh") in refused.stderr
    (tmp_path / "train.sqsh").write_bytes(b"hsqs, and more")
    site.cluster.write_text(CLUSTER + "image: train.sqsh\nmounts: [/proc:/proc, /nope:/nope]\n")
    refused = site.submit()
    assert refused.returncode == 3
    assert "mounts, item 2: /nope" in refused.stderr
    assert site.queue == {}


def test_the_image_of_a_run_must_stay_what_it_was(site: Site, tmp_path: Path) -> None:
    image = tmp_path / "train.sqsh"
    image.write_bytes(b"hsqs, and more")
    site.cluster.write_text(CLUSTER + "image: train.sqsh\n")
    assert site.submit().returncode == 0
    assert f"--container-image={image}" in site.run.launch("pretrain").read_text()
    assert len(read_json(site.run.record)["image_sha256"]) == 64
    image.write_bytes(b"hsqs, but something else")
    refused = site.submit()
    assert refused.returncode == 2
    assert "not the image that the Run was made with" in refused.stderr


def test_without_pyxis_nothing_is_submitted_that_needs_it(site: Site, tmp_path: Path) -> None:
    (tmp_path / "train.sqsh").write_bytes(b"hsqs")
    site.cluster.write_text(CLUSTER + "image: train.sqsh\n")
    (site.folder / "srun.answer").write_text("      --chdir=dir\n")
    refused = site.submit()
    assert refused.returncode == 3
    assert "srun has no --container-image" in refused.stderr
    assert not site.queue


def test_a_registrys_image_is_written_as_pyxis_wants_it(site: Site) -> None:
    site.cluster.write_text(CLUSTER + "image: registry.example.org/team/train:v1\n")
    assert site.submit().returncode == 0
    assert "--container-image=registry.example.org#team/train:v1" in site.run.launch("pretrain").read_text().replace(
        "'", ""
    )


def test_secrets_are_named_and_never_written_down(site: Site, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("HF_TOKEN=planted-in-a-file\n")
    tokens.chmod(0o644)
    site.cluster.write_text(CLUSTER + f"secret_env: [HF_TOKEN, WANDB_API_KEY]\nsecret_file: {tokens}\n")
    refused = site.submit()
    assert refused.returncode == 2
    assert f"chmod 600 {tokens}" in refused.stderr
    tokens.chmod(0o600)
    refused = site.submit()
    assert refused.returncode == 2
    assert "WANDB_API_KEY has no value" in refused.stderr
    done = site.submit(WANDB_API_KEY="planted-in-the-environment")
    assert done.returncode == 0, done.stderr
    dry = site.submit("--dry-run", WANDB_API_KEY="planted-in-the-environment")
    carried = site.folder / "environment.log"
    texts = [
        path.read_text(errors="replace")
        for folder in (site.run.root, site.folder)
        for path in folder.rglob("*")
        if path.is_file() and path != carried
    ]
    assert len(texts) > 50
    for text in [*texts, done.stdout, done.stderr, dry.stdout]:
        assert "planted" not in text
    # What only the environment has must travel with the Job; what the file has is read by what becomes srun.
    assert "planted-in-the-environment" in carried.read_text()
    assert "planted-in-a-file" not in carried.read_text()
    script = 'set -euo pipefail; source "$1"; [[ ! -v HF_TOKEN ]]; "${SECRETS[@]}" printenv HF_TOKEN'
    got = subprocess.run(
        ["bash", "-c", script, "bash", site.run.launch("pretrain")], capture_output=True, text=True, check=True
    )
    assert got.stdout == "planted-in-a-file\n"


def test_a_job_gets_of_a_shell_what_it_needs_and_nothing_else(site: Site) -> None:
    shell = {
        "AWS_SECRET_ACCESS_KEY": "canary-1", "SSH_AUTH_SOCK": "/tmp/canary-2", "HF_TOKEN": "canary-3",
        "GITHUB_TOKEN": "canary-4", "https_proxy": "http://me:canary-5@proxy:3128",
    }  # fmt: skip
    needed = {"HOME": "/home/me", "LANG": "C.UTF-8", "MODULEPATH": "/sw/modules", "LMOD_CMD": "/sw/lmod", "NCCL_IB_HCA": "mlx5",
              "no_proxy": "localhost"}  # fmt: skip
    done = site.submit(**shell, **needed)
    assert done.returncode == 0, done.stderr
    assert "HF_TOKEN: set here, and no Job gets it" in done.stderr
    assert site.verb("doctor", "--cluster", site.cluster).returncode in (0, 3)
    jobs = [json.loads(line) for line in (site.folder / "environment.log").read_text().splitlines()]
    assert len(jobs) >= len(site.queue) > 3
    assert not any("canary" in value for job in jobs for value in job.values())
    assert needed.items() <= jobs[0].items()
    assert all(job["PATH"] for job in jobs)
    for folder in (site.run.root, site.folder):
        assert not any("canary" in path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


def test_doctor_reads_the_secrets_as_submit_does(site: Site, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("# mine\nHF_TOKEN= hf_canary\n")
    tokens.chmod(0o600)
    site.cluster.write_text(CLUSTER + f"secret_env: [HF_TOKEN]\nsecret_file: {tokens}\n")
    for came in (site.submit(), site.verb("doctor", "--cluster", site.cluster)):
        assert came.returncode in (2, 3)
        told = "".join((came.stdout + came.stderr).split())
        assert f"{tokens}:2:ablankinthevalue" in told
        assert "canary" not in told


def test_a_submit_that_stood_still_until_another_took_over_queues_nothing_more(site: Site) -> None:
    sbatch = site.folder / "bin" / "sbatch"
    claim = claim_path(site.run.control / "scheduler.json", 900)
    write_json(site.folder / "other.json", {"host": "login2", "pid": 1, "beats": True})
    first, rest = sbatch.read_text().split("\n", 1)
    sbatch.write_text(f"{first}\ncp {site.folder / 'other.json'} {claim}\n{rest}")
    late = site.submit()
    assert late.returncode == 3
    assert "taken over by process 1 on login2" in late.stderr
    assert len(site.calls("sbatch")) == len(site.queue) == 1
