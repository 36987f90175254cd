"""What a cluster file names over there, looked at from where Jobs are submitted: image, interpreters, folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.cluster.schema import Cluster
from pipeline.config.schema import Config
from pipeline.plan.flags import gpus_of
from pipeline.slurm.commands import Slurm
from pipeline.submit.run_folder import run_of

LOCAL_DISKS = frozenset("ext2/ext3 ext4 xfs btrfs tmpfs overlayfs zfs ramfs".split())  # as `stat -f` names them

# Walks up to the folder that is there, and says what it is: free of anything that a name could be taken for.
LOOK = 'p=$1; while [ ! -e "$p" ]; do p=$(dirname -- "$p"); done; stat -f -c %T -- "$p"; test -w "$p" && test -d "$p"'
STAGE_MODULES = ("torch", "sentencepiece", "numpy")
FIND_MODULES = "import sys, importlib.util as u; print(*[name for name in sys.argv[1:] if u.find_spec(name) is None])"
# torch/version.py says what torch was built for: importing torch takes seconds, and may want a GPU.
READ_BUILD = (
    "import importlib.util as u, os, runpy; "
    "of = runpy.run_path(os.path.join(os.path.dirname(u.find_spec('torch').origin), 'version.py')).get; "
    "print(of('__version__'), of('cuda') or of('hip') or 'none')"
)
PYTHON_SECONDS = 60.0  # an interpreter on a file system that is busy
RUN_PYTHON = 'exec "$1" -c "import sys, $2; print(*sys.version_info[:2])"'


@dataclass(frozen=True)
class Check:
    """One thing that was looked at, and what to do where it is not as it should be."""

    name: str
    state: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""


def look_at_paths(cluster: Cluster, config: Config | None, slurm: Slurm) -> Iterator[Check]:
    """Look at interpreters and folders as they are where Slurm's commands run."""
    if cluster.image:
        yield _image(cluster.image, slurm)
    for key in ("host_python",) if cluster.image else ("python", "host_python"):  # in an image it is the image's own
        path = getattr(cluster, key)
        answer = slurm.ask(["sh", "-c", RUN_PYTHON, "sh", path, _modules(key, cluster)])
        version = answer.output.split()
        if answer.code == 0 and len(version) == 2:
            found = f"{path}, Python {'.'.join(version)}"
            if (int(version[0]), int(version[1])) >= (3, 11):
                yield _stage_packages(path, found, slurm) if key == "python" else Check(key, "ok", found)
                if key == "python" and (gpus := _gpus(cluster, config)):
                    yield from _torch_build(path, gpus, slurm)
            else:
                yield Check(key, "fail", found, "Python 3.11 or newer is needed")
        else:
            said = (answer.talk.strip().splitlines() or ["it does not run"])[-1]
            yield Check(
                key, "fail", f"{path}: {said}", f"write {key} in the cluster file: one with this package's needs"
            )
    folders = {"state_dir": cluster.state_dir}
    if cluster.login:
        folders["login.root"] = cluster.login.root
    elif config:
        folders["runs_dir"] = str(run_of(config).root.parent)
    if config:
        folders |= {f"data {Path(path).name}": path for path in _sources(config)}
    for key, folder in folders.items():
        if folder:
            yield _folder(key, folder, slurm)


def _image(image: str, slurm: Slurm) -> Check:
    if not image.startswith("/"):
        return Check("image", "ok", f"{image}: fetched by Pyxis from its registry")
    if slurm.ask(["sh", "-c", 'test -f "$1" && test -r "$1"', "sh", image]).code == 0:
        return Check("image", "ok", image)
    return Check("image", "fail", f"{image}: no such file that you may read", "mend image, or build one: nox -s image")


def _stage_packages(path: str, found: str, slurm: Slurm) -> Check:
    """Look for what stages import, without importing it: torch takes seconds, and may want a GPU."""
    missing = slurm.ask([path, "-c", FIND_MODULES, *STAGE_MODULES], PYTHON_SECONDS).output.split()
    if missing:
        advice = "stages would end at once; install them there (pip install '.[train]'), name another, or set image"
        return Check("python", "fail", f"{found}, has no {', '.join(missing)}", advice)
    return Check("python", "ok", f"{found}, with torch")


def _gpus(cluster: Cluster, config: Config | None) -> int:
    """Return how many GPUs training asks for on a node."""
    return gpus_of("pretrain", config, cluster) if config else cluster.gpus_per_node or 0


def _torch_build(path: str, gpus: int, slurm: Slurm) -> Iterator[Check]:
    """Find a torch that can use no GPU, on whatever node: it would fail on one after the other."""
    answer = slurm.ask([path, "-c", READ_BUILD], PYTHON_SECONDS)
    version, _, build = answer.output.strip().partition(" ")
    if answer.code != 0 or not build:
        return  # no torch, which is told already, or one that does not say
    if build != "none":
        yield Check("torch", "ok", f"{version}, built for {build}")
        return
    found = f"torch {version} of {path} is built without CUDA, and {gpus} GPUs a node are asked for"
    advice = "install a build with CUDA there (https://pytorch.org/get-started), name another python, or set image"
    yield Check("torch", "fail", found, f"{advice}; to train without GPUs, remove gpus_per_node")


def _modules(key: str, cluster: Cluster) -> str:
    """Name what an interpreter must be able to import: with login, host_python also plans, submits and shows."""
    return "pydantic, rich, typer, yaml" if key == "host_python" and cluster.login else "pydantic, yaml"


def _sources(config: Config) -> list[str]:
    return [source.path for source in config.data if source.path and os.path.isabs(source.path)]


def _folder(key: str, folder: str, slurm: Slurm) -> Check:
    answer = slurm.ask(["sh", "-c", LOOK, "sh", folder])
    kind = answer.output.strip()
    readable = key.startswith("data")  # of which nothing is written
    if not kind:
        return Check(key, "fail", f"{folder}: {answer.talk.strip()}", "mend the path, or its permissions")
    if answer.code != 0 and not readable:
        return Check(key, "fail", f"{folder}: you may not write there", "choose another folder, or ask for permission")
    if kind in LOCAL_DISKS:
        advice = (
            "every node must see it: choose a folder on the shared file system, unless this one is exported to them"
        )
        return Check(key, "warn", f"{folder}: on {kind}, mostly a node's own disk", advice)
    return Check(key, "ok", f"{folder}: on {kind}")
