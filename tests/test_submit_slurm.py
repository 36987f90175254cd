"""A chain is submitted once, whatever happens in between; a small Slurm on PATH keeps the queue."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import environment
from slurm_site import CLUSTER, Pipeline, Site

from pipeline.files import read_json
from pipeline.run.folder import Run


@pytest.fixture
def site(tmp_path: Path, micro: Path, pipeline: Pipeline) -> Site:
    return Site(tmp_path, micro, pipeline)


def test_one_command_submits_the_chain_with_its_edges(site: Site) -> None:
    result = site.submit("pretrain.segments=3")
    assert result.returncode == 0, result.stderr
    jobs = site.by_name()
    assert list(jobs) == ["tokenize", "pretrain-1", "pretrain-2", "pretrain-3", "evaluate", "inference"]
    ids = {name: job["id"] for name, job in jobs.items()}
    assert [job["dependency"] for job in jobs.values()] == [
        "", f"afterok:{ids['tokenize']}", f"afterany:{ids['pretrain-1']}", f"afterany:{ids['pretrain-2']}",
        f"afterok:{ids['pretrain-3']}", f"afterok:{ids['pretrain-3']}",
    ]  # fmt: skip
    assert all(job["kill"] for job in jobs.values() if job["dependency"])
    words = jobs["pretrain-1"]["words"]
    assert {"--gres=gpu:h100:1", "--partition=gpu", "--account=lm", "--nodes=1", "--time=0-01:00:00"} <= set(words)
    assert "--partition=cpu" in jobs["tokenize"]["words"]
    assert not any("gres" in word for word in jobs["tokenize"]["words"])
    assert words[-2:] == [str(site.run.snapshot / "sbatch" / "pretrain.sbatch"), str(site.run.root)]
    assert [(job["name"], job["job_id"]) for job in read_json(site.run.jobs)["jobs"]] == list(ids.items())


def test_a_second_call_submits_nothing(site: Site) -> None:
    site.submit()
    before = site.queue
    again = site.submit()
    assert again.returncode == 0, again.stderr
    assert site.queue == before
    assert "pending already" in again.stderr


@pytest.mark.parametrize("calls", [1, 2, 3, 4])
def test_submit_killed_after_any_sbatch_is_completed_by_the_next_without_doubles(site: Site, calls: int) -> None:
    bomb = site.folder / "die_after"
    bomb.write_text(str(calls))
    assert site.submit().returncode == -9
    assert len(site.queue) == calls
    bomb.unlink()
    again = site.submit()
    assert again.returncode == 0, again.stderr
    assert list(site.by_name()) == ["tokenize", "pretrain", "evaluate", "inference"]
    assert len(site.queue) == 4
    assert len(read_json(site.run.jobs)["jobs"]) == 4
    assert site.by_name()["pretrain"]["dependency"] == f"afterok:{site.by_name()['tokenize']['id']}"


def test_a_failed_stage_leaves_nothing_pending_and_resume_submits_what_is_missing(site: Site) -> None:
    site.submit()
    site.set("tokenize", "FAILED")
    assert {job["state"] for job in site.queue.values()} == {"FAILED", "CANCELLED"}
    status = site.verb("status", site.run.root)
    assert status.returncode == 1
    assert "failed" in status.stdout
    resumed = site.verb("resume", site.run.root)
    assert resumed.returncode == 0, resumed.stderr
    live = [job for job in site.queue.values() if job["state"] == "PENDING"]
    assert [job["name"] for job in live] == ["micro-tokenize", "micro-pretrain", "micro-evaluate", "micro-inference"]


def test_a_later_job_of_an_old_chain_waits_for_the_new_one(site: Site) -> None:
    site.submit("pretrain.segments=2")
    first = site.by_name()["pretrain-1"]["id"]
    site.set("tokenize", "RUNNING")
    site.verb("cancel", site.run.root)
    assert {job["state"] for job in site.queue.values()} == {"CANCELLED"}
    site.verb("resume", site.run.root)
    assert site.by_name()["pretrain-1"]["id"] != first
    assert site.by_name()["pretrain-2"]["dependency"] == f"afterany:{site.by_name()['pretrain-1']['id']}"


def test_refused_options_are_told_with_slurms_words_and_nothing_is_lost(site: Site) -> None:
    (site.folder / "refuse").write_text("sbatch: error: invalid partition specified: gpu")
    refused = site.submit()
    assert refused.returncode == 2
    assert "invalid partition specified: gpu" in refused.stderr
    assert "Traceback" not in refused.stderr
    (site.folder / "refuse").unlink()
    assert site.submit().returncode == 0
    assert len(site.queue) == 4


def test_dry_run_and_test_queue_nothing(site: Site) -> None:
    dry = site.submit("--dry-run")
    assert "sbatch --parsable" in dry.stdout
    assert "'--dependency=afterok:<tokenize>'" in dry.stdout
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
    (words,) = [json.loads(line) for line in (site.folder / "scancel.log").read_text().splitlines()]
    assert words == [str(number) for number in (104, 103, 102, 101)]


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
    texts = [
        path.read_text(errors="replace")
        for folder in (site.run.root, site.folder)
        for path in folder.rglob("*")
        if path.is_file()
    ]
    assert len(texts) > 50
    for text in [*texts, done.stdout, done.stderr, dry.stdout]:
        assert "planted" not in text
    script = 'set -euo pipefail; source "$1"; printf %s "$HF_TOKEN"'
    got = subprocess.run(
        ["bash", "-c", script, "bash", site.run.launch("pretrain")], capture_output=True, text=True, check=True
    )
    assert got.stdout == "planted-in-a-file"
