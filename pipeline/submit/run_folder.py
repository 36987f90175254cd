"""Turn a Plan into a Run on disk: folder, config, launch files, a snapshot of the code."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pipeline import __version__
from pipeline.cluster.load import open_cluster
from pipeline.cluster.schema import Cluster
from pipeline.config.load import config_differences, dump_config, load_run_config
from pipeline.config.schema import Config
from pipeline.config.types import NAME
from pipeline.config.yaml12 import shown as yaml_shown
from pipeline.config.yaml12_dump import dump
from pipeline.errors import NotReadyError, UserError
from pipeline.files import fsync_folder, read_json, read_object, write_json, write_text
from pipeline.hints import command, shown
from pipeline.image.check import check_image, image_sha256
from pipeline.inference.hugging_face import describe_folder
from pipeline.plan.jobs import Plan
from pipeline.run.folder import Run
from pipeline.run.owner import process_start
from pipeline.run.place import here

PROJECT = Path(__file__).resolve().parents[2]
SNAPSHOT_FOLDERS = ("pipeline", "sbatch")
PARCEL = "code.json"  # describes the code of a parcel, in which there is no git repository
PACKAGES = ("torch", "sentencepiece", "datasets", "numpy", "pydantic", "pyyaml")


def run_of(config: Config) -> Run:
    """Return the Run that a Config names; a relative runs_dir lies in the project, wherever it is called from."""
    return Run(PROJECT / config.runs_dir / config.name)


def config_of(run: Run, config: Config) -> Config:
    """Return `config` as the Config of this very folder, whatever name and runs_dir say: it may have been moved."""
    if run_of(config).root == run.root:
        return config
    if not NAME.fullmatch(run.name):
        fitting = re.sub(r"[^A-Za-z0-9._-]+", "-", run.name).strip("._-")[:64] or "run"
        rename = shlex.join(["mv", shown(run.root), shown(run.root.with_name(fitting))])
        raise UserError(
            f"{run.root}: {yaml_shown(run.name)} cannot be the name of a Run: 1 to 64 letters, digits, '.', '_', '-', "
            f"the first a letter or digit. Rename the folder:\n  {rename}"
        )
    return config.model_copy(update={"name": run.name, "runs_dir": str(run.root.parent)})


def check_config(run: Run, config: Config) -> Config | None:
    """Return the existing Run's Config, or None for a new Run; refuse one whose meaning has changed."""
    if not run.config.is_file():
        # A submit that was killed leaves these, and no config yet.
        ours = {
            "control",
            "inherited",
            "logs",
            "attempts",
            "launch",
            "snapshot",
            run.plan.name,
            run.record.name,
            run.cluster.name,
        }
        if run.root.is_dir() and any(e.name not in ours and not e.name.startswith(".") for e in run.root.iterdir()):
            raise UserError(f"{run.root}: the folder holds something that is not a Run; take another name: name=...")
        return None
    old = config_of(run, load_run_config(run.config))
    refused = [difference for difference in config_differences(old, config) if not difference.allowed]
    if refused:
        changes = "\n".join(f"  {d.key}: {d.old!r} -> {d.new!r}" for d in refused)
        raise UserError(
            f"{run.root}: this Run was made with another config. These keys may not change within a Run:\n{changes}\n"
            f"For a new Run give a new name, for example: name={config.name}-2"
        )
    return old


def prepare(run: Run, config: Config, plan: Plan, cluster: Cluster | None = None, *, keep_code: bool = False) -> bool:
    """Write all that the Jobs read. Each file appears whole; config.yaml, which makes it a Run, comes last.

    With `keep_code` a snapshot that is there stays: Jobs that are queued or running use it. Return whether the Run got
    its id only now, so that no Job can be its own.
    """
    try:
        run.root.mkdir(parents=True, exist_ok=True)
        for folder in (run.control, run.logs, run.root / "attempts", run.root / "launch"):
            folder.mkdir(exist_ok=True)
        remove_leftovers(run)
        keep_code = keep_code and run.snapshot.is_dir()
        if keep_code and code_digest(run.snapshot) != code_digest(PROJECT):
            _check_kept(run, config)
            return False  # other code need not read what this one writes
        changed = not keep_code and take_snapshot(run)
        for name, text in plan.files.items():
            write_text(run.root / name, text)
        write_json(run.plan, plan.to_json())
        image = image_of(run, cluster)
        is_new = not run.record.is_file()
        if is_new:
            write_json(run.record, describe(config) | here(run) | image)
        elif changed:
            run.event("code changed", **describe_code())
        if cluster is not None and cluster.scheduler == "slurm":
            write_text(run.cluster, dump(cluster.model_dump()))
        write_text(run.config, dump_config(config))
        return is_new
    except OSError as error:
        raise UserError(f"{run.root}: cannot make the Run: {error.strerror or error}") from error


def _check_kept(run: Run, config: Config) -> None:
    """Refuse what cannot be said to Jobs that are queued or running with other code than this."""
    again = f"\n  {command('cancel', run.root)}\n  {command('resume', run.root)}"
    if not run.job_records.is_dir():
        raise NotReadyError(
            f"{run.root}: its Jobs are of version 0.1.0. Wait for their end, or start them anew:{again}"
        )
    if load_run_config(run.config) != config:
        told = "its Jobs were queued with other code, which goes on to read the config as it is"
        raise NotReadyError(f"{run.root}: {told}. To change it, start them anew, with the change:{again}")


def image_of(run: Run, cluster: Cluster | None) -> dict[str, Any]:
    """Describe the file of the image that stages will run in; UserError where the Run was made with another one."""
    if cluster is None or cluster.image is None or not cluster.image.startswith("/"):
        return {}  # of a registry's image only a digest in its name would say which it is
    image = Path(cluster.image)
    if expected := read_object(run.record).get("image_sha256"):
        check_image(image, str(expected))
        return {}
    return {"image": cluster.image, "image_sha256": image_sha256(image)}


def remove_leftovers(run: Run) -> None:
    """Remove the temporary files of killed writers; `.NAME.PID.tmp` names the process that would have renamed it."""
    for path in run.root.rglob(".*.tmp"):
        pid = path.name.split(".")[-2]
        if path.is_file() and pid.isdigit() and process_start(int(pid)) is None:
            path.unlink(missing_ok=True)


def describe(config: Config) -> dict[str, Any]:
    """Collect what a twin of this Run would need: code, versions, machine, seed."""
    return {
        "id": secrets.token_hex(6),  # by which Slurm's queue is asked for the Jobs of this very Run
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "pipeline": __version__,
        **describe_code(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "host": platform.node(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "seed": config.seed,
    } | ({"init_from": describe_folder(Path(config.pretrain.init_from))} if config.pretrain.init_from else {})


def is_parcel(folder: Path) -> bool:
    """Tell whether a folder is what another machine has sent here to be submitted: code, config and cluster."""
    return (folder / PARCEL).is_file()


def describe_code() -> dict[str, Any]:
    """Name this code: its commit, where it is in a git repository or was sent from one, and its digest."""
    if isinstance(sent := read_json(PROJECT / PARCEL), dict):
        return sent
    git = ["git", "-C", str(PROJECT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "code": code_digest(PROJECT)}
    return {"commit": commit.stdout.strip(), "modified": bool(status.stdout.strip()), "code": code_digest(PROJECT)}


def _version(package: str) -> str | None:
    from importlib import metadata  # which reads e-mail: every verb would pay for it

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def code_files(root: Path) -> list[Path]:
    return sorted(
        path
        for folder in SNAPSHOT_FOLDERS
        for path in (root / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    )


def code_digest(root: Path) -> str:
    """Hash the names and bytes of the code in `root`."""
    digest = hashlib.sha256()
    for path in code_files(root):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def take_snapshot(run: Run) -> bool:
    """Copy the code into the Run, so that a `git pull` changes nothing in it; return whether it was other code before.

    Bash reads a script while it runs it, and a stage imports modules late: neither may see a file change.
    """
    if run.snapshot.is_dir() and code_digest(run.snapshot) == code_digest(PROJECT):
        return False
    fresh, old = run.root / f".snapshot.{os.getpid()}.tmp", run.root / f".snapshot.{os.getpid()}.old"
    for leftover in run.root.glob(".snapshot.*"):  # of a killed submit
        shutil.rmtree(leftover, ignore_errors=True)
    for path in code_files(PROJECT):
        target = fresh / path.relative_to(PROJECT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    existed = run.snapshot.is_dir()
    if existed:
        run.snapshot.rename(old)
    fresh.rename(run.snapshot)
    fsync_folder(run.root)
    shutil.rmtree(old, ignore_errors=True)
    return existed


def read_jobs(run: Run) -> dict[str, Any]:
    """Return jobs.json, or an empty record before anything was submitted."""
    return {"jobs": []} | read_object(run.jobs)


def read_cluster(run: Run) -> Cluster:
    """Return the cluster that the Run was planned for."""
    return open_cluster(str(run.cluster), sys.executable)
