"""Where lines of metrics also go, for people who watch them there: TensorBoard, Weights & Biases."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from pipeline.errors import NotReadyError

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


class Sink(Protocol):
    """Takes the numbers of one log line."""

    def write(self, step: int, values: dict[str, float]) -> None: ...

    def rewind(self, step: int) -> None:
        """Take back what came after `step`, or be ready for the same steps again."""

    def close(self) -> None: ...


def open_sinks(names: list[str], folder: Path, run_name: str, run_id: str) -> list[Sink]:
    """Open the sinks, whose files lie in `folder`; `run_id` is the same after a resume.

    Raises NotReadyError where a package is missing.
    """
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise NotReadyError(
                f"pretrain.sinks: {name} is not installed where this runs; install it (pip install {PACKAGES[name]}, "
                "or the extra `sinks`), or take it out of the list"
            )
    if names:
        folder.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Callable[[], Sink]] = {
        "tensorboard": lambda: TensorBoardSink(folder),
        "wandb": lambda: WandbSink(folder, run_name, run_id),
    }
    return [makers[name]() for name in names]


class TensorBoardSink:
    """Event files in folder/tensorboard; a rewound step hides what was written after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tensorboard"
        self._open(None)

    def _open(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder), purge_step=purge_step)

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def rewind(self, step: int) -> None:
        self.close()
        self._open(step + 1)

    def close(self) -> None:
        self.writer.close()


class WandbSink:
    """A run of W&B in folder/wandb, offline unless WANDB_MODE says otherwise; the same run after every resume.

    Its own counter cannot go back, so curves are drawn over the metric `step`.
    """

    def __init__(self, folder: Path, run_name: str, run_id: str) -> None:
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "pretrain-pipeline"), name=run_name, id=run_id,
            mode=os.environ.get("WANDB_MODE", "offline"), resume="allow", dir=str(folder),
        )  # fmt: skip
        self.run.define_metric("*", step_metric="step")

    def write(self, step: int, values: dict[str, float]) -> None:
        self.run.log({"step": step} | values)

    def rewind(self, step: int) -> None:
        return None

    def close(self) -> None:
        self.run.finish()


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return what of a log line can be drawn."""
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and name not in ("step", "time")
    }
