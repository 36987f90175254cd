"""How a Stage runs in an image: srun's container options, which Pyxis adds, from the cluster file and the Run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from pipeline.cluster.parts import UNSAFE_IN_MOUNTS
from pipeline.cluster.schema import Cluster
from pipeline.config.named_paths import named_paths
from pipeline.config.schema import Config
from pipeline.config.yaml12 import shown
from pipeline.errors import NotReadyError, UserError
from pipeline.image.reference import parse_image, require
from pipeline.run.folder import Run
from pipeline.slurm.commands import Slurm

GLOB = re.compile(r"[*?\[]")
FILE_SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet", ".gz", ".zst", ".model")


def container_options(config: Config, cluster: Cluster, run: Run, exported: Iterable[str]) -> list[str]:
    """Return srun's words for the cluster's image; none where stages run without one.

    The Run lies at the same path inside. Only it may be written: its code, data from elsewhere and the root file system
    are read-only. Every variable of `exported` wins over the image's own /etc/environment.
    """
    if cluster.image is None:
        return []
    mounts = [_mount(run.root, "rw"), _mount(run.snapshot, "ro")]
    mounts += [_mount(folder, "ro") for folder in data_folders(config, run)]
    mounts += [mount if mount.endswith((":ro", ":rw")) else f"{mount}:ro" for mount in cluster.mounts]
    return [
        f"--container-image={cluster.image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={run.root}",
        f"--container-env={','.join(exported)}",
        "--no-container-mount-home",
        "--container-readonly",
    ]


def _mount(folder: Path, mode: str) -> str:
    """Write a folder that is mounted at its own path; UserError where Pyxis would read its name as something else."""
    if found := UNSAFE_IN_MOUNTS.search(str(folder)):
        raise UserError(
            f"{folder}: a name with {shown(found[0])} cannot be mounted into a container; rename the folder, "
            "or make a link to it with another name and write that"
        )
    return f"{folder}:{folder}:{mode}"


def check_container(cluster: Cluster) -> None:
    """Refuse an image or a mount that is not there, before anything is queued: on a node it fails in its own words."""
    if cluster.image is None:
        return
    require(parse_image(cluster.image, Path.cwd()))
    for number, mount in enumerate(cluster.mounts, start=1):
        source = mount.split(":")[0]
        if not Path(source).exists():
            raise NotReadyError(f"mounts, item {number}: {source} is not there; make it, or mend the cluster file")


def check_pyxis(cluster: Cluster, slurm: Slurm) -> None:
    """Refuse to submit steps that run in an image where srun knows nothing of images."""
    if cluster.image and not slurm.srun_knows("container-image"):
        raise NotReadyError(
            "image: srun has no --container-image where Jobs are submitted, so there is no Pyxis; ask an administrator "
            "for it, or remove image and name a python that has the packages"
        )


def data_folders(config: Config, run: Run) -> list[Path]:
    """List the folders outside the Run that its stages read: of documents, datasets, models, prompts and questions."""
    folders: list[Path] = []
    for path in named_paths(config):
        if not path.text.startswith("/"):  # on the hub
            continue
        folder = Path(path.text) if path.kind in ("dataset", "model", "lm_eval") else _folder_of(path.text)
        if folder not in folders and not folder.is_relative_to(run.root) and folder != Path("/"):
            folders.append(folder)
    return [folder for folder in folders if not any(other in folder.parents for other in folders)]


def _folder_of(place: str) -> Path:
    """Return the folder that holds a file, a folder itself, or all that a glob may find."""
    parts = Path(place).parts
    fixed = next((number for number, part in enumerate(parts) if GLOB.search(part)), None)
    if fixed is not None:
        return Path(*parts[:fixed])
    # By its name alone: a Plan looks at no disk. A folder with a known ending has the folder above it mounted.
    path = Path(place)
    return path.parent if path.suffix in FILE_SUFFIXES else path
