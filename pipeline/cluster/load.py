"""Read a cluster file, or take this machine for the cluster."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.cluster.schema import RULES, Cluster
from pipeline.config.checks import check
from pipeline.config.errors import ConfigError, Mistake
from pipeline.config.named_paths import PathError
from pipeline.config.paths import expand
from pipeline.config.yaml12 import Document, load_document, shown
from pipeline.errors import UserError
from pipeline.hints import again, command
from pipeline.image.reference import parse_image
from pipeline.slurm.commands import Slurm

PING_SECONDS = 3
IMAGE_PYTHON = "/usr/bin/python3"


def local_cores() -> int:
    """Count the CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def load_cluster(path: Path, python: str) -> Cluster:
    """Read the cluster file at `path`; ConfigError with all mistakes at once, or YamlError."""
    document = load_document(path, "cluster file", "scheduler: slurm")
    data: dict[str, Any] = document.data
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-")[:64] or "cluster"
    defaults: dict[str, Any] = {"name": name, "python": python, "host_python": python}
    if data.get("image"):
        defaults["python"] = IMAGE_PYTHON
    if data.get("scheduler") == "local":
        defaults["cores"] = local_cores()
    document.data = defaults | data
    cluster, mistakes = check(Cluster, RULES, document)
    if cluster is not None and cluster.login is not None:
        mistakes += _strange_interpreters(document, data, cluster)
    if cluster is not None and cluster.login is None:  # elsewhere, a home folder and variables are other ones
        changes = {}
        for key in ("python", "host_python", "state_dir", "secret_file", "image_cache"):
            try:
                changes[key] = expand(text) if (text := getattr(cluster, key)) else text
            except PathError as error:
                mistakes.append(Mistake(document.place((key,)), key, f"{shown(data[key])} {error}"))
        cluster = cluster.model_copy(update=changes)
    if cluster is not None and cluster.image is not None:
        try:
            cluster = cluster.model_copy(update={"image": parse_image(cluster.image, Path.cwd()).pyxis()})
        except (ValueError, UserError) as error:
            mistakes.append(Mistake(document.place(("image",)), "image", f"{shown(data['image'])} {error}"))
    if cluster is not None and cluster.image_cache and not (cluster.image or "").startswith("/"):
        advice = "only the file of an image can be copied and verified; write its path below image, or remove this line"
        mistakes.append(Mistake(document.place(("image_cache",)), "image_cache", advice))
    if mistakes or cluster is None:
        raise ConfigError(document.source, mistakes)
    return cluster


def _strange_interpreters(document: Document, data: dict[str, Any], cluster: Cluster) -> Iterator[Mistake]:
    """Yield the interpreters that a cluster elsewhere needs and that were left to this machine, or its shell."""
    for key in ("python", "host_python"):
        if key == "python" and cluster.image:
            continue  # the image's own
        if key not in data:
            advice = "is missing: with login, this machine's interpreter means nothing; write the one over there"
            yield Mistake(document.place(("login",)), key, f"{advice}, for example /shared/env/bin/python")
        elif not getattr(cluster, key).startswith("/"):
            advice = "with login, ~ and variables would be those of this machine; write the whole path, from / on"
            yield Mistake(document.place((key,)), key, f"{shown(data[key])}: {advice}")


def open_cluster(name: str | None, python: str) -> Cluster:
    """Return the cluster that `--cluster` names; without a name this machine, unless a Slurm answers here."""
    if name is None and Slurm().ping(PING_SECONDS):
        raise UserError(
            "a Slurm controller answers on this machine, and training on its login node is seldom what people want.\n"
            "To run on that Slurm, have a file written about it, look through it, and name it:\n"
            f"  {command('init', '--cluster', 'cluster.yaml')}\n"
            f"  {again('--cluster', 'cluster.yaml')}\n"
            "To run right here all the same:\n"
            f"  {again('--cluster', 'local')}"
        )
    if name in (None, "local"):
        return Cluster(scheduler="local", python=python, host_python=python, cores=local_cores())
    path = Path(str(name))
    if not path.exists():
        make = f"to have one written: {command('init', '--cluster', 'cluster.yaml')}"
        raise UserError(f"--cluster {shown(str(name))}: no such file; {make}; to run on this machine: --cluster local")
    return load_cluster(path, python)
