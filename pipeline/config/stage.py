"""What every stage's section has."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pipeline.config.types import Section, Time
from pipeline.slurm.options import SbatchOptions, SrunOptions

SEED = Field(ge=0, le=2**32 - 1, description="seed of the random numbers")


class StageSection(Section):
    """What every stage's Job may ask for; these keys may change on an existing Run."""

    time: Annotated[
        Time,
        Field(description="time limit of a Job: D-HH:MM:SS, D-HH, HH:MM:SS, MM:SS or minutes; rounded up to minutes"),
    ] = "1:00:00"
    sbatch: Annotated[
        SbatchOptions,
        Field(
            description="options of sbatch over those of the cluster file: Slurm's names without dashes",
            examples=["{partition: gpu}"],
        ),
    ] = {}
    srun: Annotated[
        SrunOptions,
        Field(description="options of srun, over those of the cluster file", examples=["{cpu-bind: cores}"]),
    ] = {}
