"""Train the model of a Run, from its newest whole checkpoint on."""

from __future__ import annotations

from pipeline.stages import early  # first: signals are taken while torch is imported

# isort: split
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from pipeline.config.schema import Config
from pipeline.errors import UserError
from pipeline.files import read_lines, read_object, write_json
from pipeline.lm.checkpoint import LAG_SECONDS
from pipeline.lm.compile_cache import begin_compiling, keep_compiled
from pipeline.lm.door import open_door
from pipeline.lm.hardware import Hardware, choose_hardware, end_ranks, start_ranks
from pipeline.lm.ledger import Ledger
from pipeline.lm.mixture import make_batches
from pipeline.lm.origin import origin
from pipeline.lm.shards import TokenShards
from pipeline.lm.sinks import Sink, open_sinks
from pipeline.lm.trainer import Files, Outcome, Trainer, cut_back
from pipeline.lm.verified import verify_shards
from pipeline.lm.watchdog import Around, Rank, Watchdog
from pipeline.plan.sizes import num_parameters
from pipeline.run.complete import awaits_evaluation
from pipeline.run.folder import Run
from pipeline.run.owner import is_alive, process_start
from pipeline.run.saves import begin_anew, check_checkpoints
from pipeline.run.verdict import said_since
from pipeline.stages.main import Attempt, LostRankError, abandon, fence, run_stage, stop_reason


def pretrain(run: Run, config: Config, attempt: Attempt) -> int:
    """Train to max_steps; return the last step."""
    hardware = _settle(run, config)
    watchdog = _watchdog(run, config, attempt)
    watchdog.start()
    try:
        start_ranks(hardware)
        if attempt.rank == 0:
            begin_compiling(run.compile_cache)  # the others wait for it in the next line
        watchdog.fellows = _meet(watchdog.me)
        outcome = _train(run, config, attempt, hardware, watchdog)
        if hardware.world_size > 1:
            dist.barrier()  # rank 0 may still be clearing up: no rank leaves before the last is done
    except early.Stopped:
        raise
    except Exception as error:
        if hardware.world_size > 1 and _is_broken_connection(error):
            lost = watchdog.await_lost()
            cause = f"{lost} is gone: it was killed, or ended by itself" if lost else f"the connection broke: {error}"
            raise LostRankError(f"{cause}; {watchdog.after}") from error
        raise
    finally:
        watchdog.close()
    end_ranks()
    if outcome.stopped is not None:
        raise early.Stopped(outcome.stopped, outcome.step)
    return outcome.step


def _train(run: Run, config: Config, attempt: Attempt, hardware: Hardware, watchdog: Watchdog) -> Outcome:
    shards = _shards(run, config, attempt, watchdog)
    batches = make_batches(shards, config)
    sinks = _sinks(run, config) if attempt.rank == 0 else []
    files = _files(run, config, attempt, watchdog, sinks)
    if attempt.rank == 0:
        files.ledger.write(now=True)  # from here on its time is accounted for, however it ends
    trainer = Trainer(config, hardware, batches, files, origin(config, shards))
    try:
        return trainer.train()
    finally:
        for sink in sinks:
            sink.close()
        if attempt.rank == 0:
            files.ledger.write(now=True)


def _shards(run: Run, config: Config, attempt: Attempt, watchdog: Watchdog) -> TokenShards:
    """Open the tokens, and hash those that nobody has hashed since they were written."""

    def progress() -> None:
        watchdog.expect("start-up after a look at the token shards", config.pretrain.first_step_timeout)

    began, shards = time.monotonic(), TokenShards(run.data, "train")
    found = verify_shards(shards, run.verified, progress)
    if attempt.rank == 0 and found.hashed:
        seconds = time.monotonic() - began
        print(f"{found.hashed} of {found.shards} token shards hashed, {found.bytes / 1e9:.2f} GB in {seconds:.1f} s")
        _event(run, attempt)("shards verified", **asdict(found), seconds=round(seconds, 3))
    return shards


def _sinks(run: Run, config: Config) -> list[Sink]:
    record = read_object(run.record)
    return open_sinks(list(config.pretrain.sinks), run.sinks, run.name, str(record.get("id", run.name)))


def _look(run: Run) -> None:
    """Raise where checkpoints were saved and this host sees none, even after a while."""
    deadline = time.monotonic() + LAG_SECONDS
    while True:
        try:
            check_checkpoints(run)
            return
        except UserError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def _begins(run: Run) -> None:
    """Note that training begins at step 0; lines of metrics that are there led to no checkpoint."""
    begin_anew(run)
    if run.metrics.is_file():
        cut_back(run.metrics, 0)


def _settle(run: Run, config: Config) -> Hardware:
    """Choose the hardware as this Run did before; rank 0 records it in run.json."""
    record = read_object(run.record)
    hardware = choose_hardware(config, record.get("hardware"))
    if hardware.rank == 0 and record.get("hardware") != hardware.to_json():
        parameters = num_parameters(config.model, config.tokenize.vocab_size)
        write_json(run.record, record | {"parameters": parameters, "hardware": hardware.to_json()})
    return hardware


def _watchdog(run: Run, config: Config, attempt: Attempt) -> Watchdog:
    me = Rank(attempt.rank, socket.gethostname(), os.getpid(), process_start(os.getpid()), open_door())
    around = Around(
        is_alive=lambda rank: is_alive({"host": rank.host, "pid": rank.pid, "started": rank.started}),
        stop_reason=lambda: stop_reason(run, attempt),
        said=lambda: _said(run, attempt),
        event=_event(run, attempt),
        hangs=lambda: _hangs(run, attempt),
        end=lambda verdict, reason, step: abandon(run, attempt, verdict, reason, step),
    )
    return Watchdog(me, around, config.pretrain.first_step_timeout, config.pretrain.hang_timeout)


def _said(run: Run, attempt: Attempt) -> tuple[str, str] | None:
    record = said_since(run, attempt.job_id, attempt.number, early.STARTED)
    return (record.verdict, record.reason) if record else None


def _hangs(run: Run, attempt: Attempt) -> list[dict[str, Any]]:
    """Return what the ranks of this attempt have told of a hang."""
    mine = {"event": "hang", "job_id": attempt.job_id, "attempt": attempt.number}
    return [
        event for event in read_lines(run.events) if mine.items() <= event.items() and event["time"] >= early.STARTED
    ]


def _meet(me: Rank) -> list[Rank]:
    """Tell all ranks who they are; a pid says nothing on another host, so each looks after those of its own."""
    if not dist.is_initialized():
        return [me]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, me)
    return ranks


def _is_broken_connection(error: Exception) -> bool:
    """Tell whether an error only says that another rank no longer answers."""
    text = f"{type(error).__name__} {error}"
    return any(word in text for word in ("gloo", "NCCL", "Connection", "DistNetworkError", "TCPStore", "Broken pipe"))


def _event(run: Run, attempt: Attempt) -> Callable[..., None]:
    def event(kind: str, **details: Any) -> None:
        run.event(kind, stage=attempt.stage, job_id=attempt.job_id, attempt=attempt.number, **details)

    return event


def _files(run: Run, config: Config, attempt: Attempt, watchdog: Watchdog, sinks: list[Sink]) -> Files:
    def write_ledger(account: dict[str, Any]) -> None:
        fence(run, attempt)
        about = {"job_id": attempt.job_id, "attempt": attempt.number, "host": socket.gethostname()}
        write_json(run.ledger(attempt.job_id, attempt.number), about | account)

    return Files(
        run.checkpoints,
        run.metrics,
        _event(run, attempt),
        lambda: stop_reason(run, attempt),
        save_wanted=run.save.exists,
        save_done=lambda: run.save.unlink(missing_ok=True),
        wanted=lambda step: awaits_evaluation(run, config, step),
        fence=lambda: fence(run, attempt),
        ledger=Ledger(attempt.began, write_ledger),
        watchdog=watchdog,
        sinks=sinks,
        look=lambda: _look(run),
        begins=lambda: _begins(run),
        first_step_done=lambda: keep_compiled(run.compile_cache),
    )


if __name__ == "__main__":
    sys.exit(run_stage("pretrain", pretrain, polls=True))
