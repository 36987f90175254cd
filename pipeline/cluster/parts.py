"""The parts of a cluster file: its kinds of values, the options of stages, the way in."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from pipeline.config.types import LINE, Section, broken_rule, one_or_more
from pipeline.config.yaml12 import shown
from pipeline.slurm.commands import Quoting
from pipeline.slurm.gres import gpus_in
from pipeline.slurm.options import SbatchOptions, SrunOptions

# Pyxis splits its mounts at commas and colons, and Enroot's bash reads the rest in double quotes.
UNSAFE_IN_MOUNTS = re.compile(r'[,:"$`\x00-\x1f]')
AMOUNT = re.compile(r"0|[1-9][0-9]{0,12}[KMGT]")


def _absolute(value: object) -> object:
    if isinstance(value, str) and not value.startswith(("/", "~", "$")):
        raise broken_rule("is not an absolute path; write all of it, from / on")
    return value


def _memory(value: object) -> object:
    if not isinstance(value, str) or AMOUNT.fullmatch(value):
        return value
    if value.isdecimal():
        raise broken_rule(f"is {value} megabytes to Slurm; write {value}G, or {value}M if that is meant")
    tidy = re.fullmatch(r"([1-9][0-9]*) ?([kmgtKMGT])(i?[bB])?", value)
    advice = f"write {tidy[1]}{tidy[2].upper()}" if tidy else "write for example 64G, or 0 for all of a node's"
    raise broken_rule(f"is not an amount of memory; {advice}")


def _gpus(value: object) -> object:
    if isinstance(value, str) and ":" in value and (gpus := gpus_in(f"gpu:{value.removeprefix('gpu:')}")):
        kind = f" and gpu_type: {gpus[0].kind}" if gpus[0].kind else ""
        raise broken_rule(f"is type and number in one; write gpus_per_node: {gpus[0].number}{kind}")
    return value


def _gpu_type(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", value):
        raise broken_rule("is not a type of GPU; write it as `sinfo -o %G` shows it, for example h100")
    return value


def _mount(value: object) -> object:
    if not isinstance(value, str):
        return value
    parts = value.split(":")
    if "," in value:
        raise broken_rule("holds a comma, which separates mounts; mount the folder above")
    if len(parts) not in (2, 3) or not all(part.startswith("/") for part in parts[:2]):
        raise broken_rule("is not a mount; write /source:/target, and :rw where it may be written")
    if found := UNSAFE_IN_MOUNTS.search("".join(parts)):
        raise broken_rule(f"holds {shown(found[0])}, which a container's mount cannot; mount a folder of another name")
    if len(parts) == 3 and parts[2] not in ("ro", "rw"):
        raise broken_rule("ends with something else than ro or rw; write /source:/target:ro")
    return value


def _secret_name(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise broken_rule("is not a variable's name; write the name alone, its value belongs into secret_file")
    return value


def _cluster(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9][\w.-]*", value):
        raise broken_rule("is not the name of one cluster; write it as `sacctmgr show clusters` does, for example gpu2")
    if value == "all":
        raise broken_rule("is no single cluster, and Jobs of two clusters may have one id; write the name of one")
    return value


CLUSTER = BeforeValidator(_cluster)
MOUNT, SECRET_NAME = BeforeValidator(_mount), BeforeValidator(_secret_name)
ABSOLUTE, MEMORY = BeforeValidator(_absolute), BeforeValidator(_memory)
GPUS, GPU_TYPE = BeforeValidator(_gpus), BeforeValidator(_gpu_type)


class Options(Section):
    """Options of one stage's Jobs, over those of the whole cluster."""

    sbatch: Annotated[SbatchOptions, Field(description="options of sbatch", examples=["{partition: cpu}"])] = {}
    srun: Annotated[SrunOptions, Field(description="options of srun", examples=["{cpu-bind: cores}"])] = {}


class Stages(Section):
    """Options for single stages, each a mapping of `sbatch` and `srun`."""

    preflight: Annotated[Options, Field(description="options for preflight alone")] = Options()
    tokenize: Annotated[Options, Field(description="options for tokenize alone")] = Options()
    pretrain: Annotated[Options, Field(description="options for pretrain alone")] = Options()
    evaluate: Annotated[Options, Field(description="options for evaluate alone")] = Options()
    inference: Annotated[Options, Field(description="options for inference alone")] = Options()


class Login(Section):
    """How to reach Slurm's commands from a machine that has none."""

    prefix: Annotated[
        list[Annotated[str, LINE]],
        Field(description="words before each command", examples=["[ssh, login01]"]),
        BeforeValidator(one_or_more, json_schema_input_type=str | list[str]),
    ]
    quoting: Annotated[
        Quoting,
        Field(
            description="one-string: the prefix hands ONE text to a shell, as `ssh` and `su - user -c` do; "
            "two-strings: that text goes through a second shell, as by `ssh login01 su - user -c`"
        ),
    ] = "one-string"
    root: Annotated[
        str, Field(description="folder over there that Runs are copied into", examples=["/shared/me/pipeline"]), LINE
    ]

    @model_validator(mode="after")
    def _root_is_absolute(self) -> Login:
        if not self.root.startswith("/"):
            raise broken_rule(f"needs an absolute root; {shown(self.root)} does not begin with /")
        return self
