"""The verbs on what Runs need around them: cluster files, the image, the schema of configs. Imports wait as in cli."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.words import ClusterName, Json, emit, screen, talk
from pipeline.errors import UserError


def init(
    cluster: Annotated[bool, typer.Option("--cluster", help="Write a cluster file.")] = False,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Without it: cluster.yaml.")] = None,
    login: Annotated[
        str | None,
        typer.Option(
            "--login", metavar="'ssh login01'", help="Words that reach the machine that has Slurm, if not this."
        ),
    ] = None,
) -> None:
    """Write a cluster file from what Slurm says about itself, here or by --login: init --cluster [FILE]."""
    from pipeline.cluster.init import DEFAULT_FILE, init_cluster
    from pipeline.cluster.login import open_login
    from pipeline.hints import command
    from pipeline.slurm.commands import Slurm

    if not cluster:
        raise UserError(f"init writes a cluster file; write: {command('init', '--cluster', file or DEFAULT_FILE)}")
    path = file or DEFAULT_FILE
    place = open_login(login) if login is not None else None
    init_cluster(path, Slurm(tuple(place.prefix), place.quoting) if place else Slurm(), place)
    emit(f"{path} is written. Look through it, then have it checked:\n  {command('doctor', '--cluster', path)}")


def doctor(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONFIG|RUN|key.path=value", help="What to check against the cluster, if anything."),
    ] = None,
    cluster: ClusterName = None,
    as_json: Json = False,
) -> int:
    """Check a cluster from here, and a config against it: doctor [CONFIG] --cluster FILE."""
    from pipeline.cluster import doctor as doctors
    from pipeline.cluster.load import open_cluster
    from pipeline.submit.ask import read_config

    if cluster is None:
        raise UserError("doctor needs a cluster file; write: doctor --cluster FILE")
    place = open_cluster(cluster, sys.executable)
    config = read_config(what, lambda run: place) if what else None
    checks, code = doctors.doctor(place, config)
    if as_json:
        emit(json.dumps(doctors.to_json(checks), indent=2))
    else:
        doctors.print_checks(checks, screen())
    return code


def image(
    target: Annotated[str, typer.Option("--target", metavar="cpu|gpu", help="What it is for.")] = "cpu",
    builder: Annotated[
        str | None,
        typer.Option("--builder", metavar="NAME", help="docker, podman, buildah, enroot, mmdebstrap: the first here."),
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", metavar="IMAGE", help="Built upon instead of the Dockerfile's.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", metavar="FOLDER", help="Without it: images.")] = None,
    as_json: Json = False,
) -> None:
    """Build the image that stages run in, and test it; nothing is built where it is there already."""
    from pipeline.image import build as images
    from pipeline.image.check import record_path

    path, built = images.build(
        target, builder, base, output or images.FOLDER, lambda text: talk.print(text, soft_wrap=True)
    )
    if as_json:
        record = json.loads(record_path(path).read_text(encoding="utf-8"))
        emit(json.dumps({"path": str(path), "built": built} | record, indent=2))
        return
    if not built:
        talk.print("nothing to build: all that it is made from is unchanged")
    emit(str(path))


def schema() -> None:
    """Print the JSON Schema of a config file, for editors."""
    from pipeline.config.docs import config_schema

    emit(json.dumps(config_schema(), indent=2))
