"""The section `preflight`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pipeline.config.stage import StageSection
from pipeline.config.types import REAL, WHOLE, Time


class PreflightConfig(StageSection):
    """A look at the nodes, their network and the Run's folder, before each attempt of training."""

    time: Annotated[Time, Field(description="time limit of a Job that does only this")] = "15:00"
    enabled: Annotated[bool, Field(description="look before each attempt of training")] = True
    min_bus_gbps: Annotated[
        float | None,
        Field(gt=0, le=1e6, description="bus bandwidth of an all-reduce over all ranks, GB/s; null: only reported"),
        REAL,
    ] = None
    min_free_bytes: Annotated[
        int | None,
        Field(ge=0, le=10**18, description="free in the Run's folder; null: `pretrain.keep_last` + 1 checkpoints"),
        WHOLE,
    ] = None
    max_clock_skew: Annotated[
        float, Field(gt=0, le=1e6, description="seconds by which the nodes' clocks may differ"), REAL
    ] = 5.0
    timeout: Annotated[
        float, Field(gt=0, le=1e5, description="seconds for all nodes to arrive, and for the all-reduce"), REAL
    ] = 180.0
