"""Look at the nodes of an attempt before it trains: each tells of itself, rank 0 judges, and all time an all-reduce.

A thread does the work, so that the main thread can end it at any moment: nvidia-smi, the driver and a collective may
never return. What a node does next it writes down first; so one that hangs is known by its last words.
"""

from __future__ import annotations

from pipeline.stages import early  # first: signals are taken while torch is imported

# isort: split
import faulthandler
import os
import threading
import time
from typing import TYPE_CHECKING

from pipeline.config.schema import Config
from pipeline.errors import BadNodesError
from pipeline.files import write_json
from pipeline.preflight.findings import AllReduce, NodeRecord, RankRecord
from pipeline.preflight.granted import affinity
from pipeline.preflight.node import (
    ask_driver,
    connect,
    expected_nodes,
    file_skew,
    look_around,
    node_name,
    own_variables,
)
from pipeline.run.blame import Fault, blamed_nodes
from pipeline.run.folder import Run
from pipeline.run.verdict import said_since
from pipeline.stages.main import Attempt, LostRankError, leave, poll, run_stage
from pipeline.stages.preflight_head import LAG_SECONDS, POLL_SECONDS, Head

if TYPE_CHECKING:
    from pipeline.lm.gathering import Gathering

IMPORT_SECONDS = 600.0  # a thousand nodes read it from one file system
CONNECT_SECONDS = 30.0  # to connect to rank 0 once it is known to be there
GRACE_SECONDS = 15.0  # for rank 0 to speak before another rank does
BROKEN_SECONDS = 5.0  # for a rank that failed to leave its verdict before one that only lost its connection
BROKEN = ("onnection", "roken pipe", "DistNetworkError", "imed out", "imeout", "emote process exited")
WITH_OTHERS = ("waiting for rank 0's word", "joining the process group", "all-reduce")


def preflight(run: Run, config: Config, attempt: Attempt) -> None:
    """Do it in a thread and watch it."""
    checkup = Checkup(run, config, attempt)
    # Should the thread hold the interpreter for ever, a C thread ends this process.
    faulthandler.dump_traceback_later(IMPORT_SECONDS + 6 * config.preflight.timeout, exit=True)
    thread = threading.Thread(target=checkup.work, name="preflight", daemon=True)
    thread.start()
    while thread.is_alive():
        poll(run, attempt)
        if time.monotonic() > checkup.deadline + (0 if attempt.rank == 0 else GRACE_SECONDS):
            checkup.overdue()
        if said_since(run, attempt.job_id, attempt.number, early.STARTED) is not None:
            raise LostRankError("another rank has failed")
        thread.join(POLL_SECONDS)
    faulthandler.cancel_dump_traceback_later()
    if checkup.error is not None:
        raise checkup.error


class Checkup:
    """One rank's part in a preflight; local rank 0 does its node's part too, and rank 0 that of the Head."""

    def __init__(self, run: Run, config: Config, attempt: Attempt) -> None:
        self.run, self.attempt, self.timeout = run, attempt, config.preflight.timeout
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.me = NodeRecord(
            node=node_name(),
            rank=attempt.rank,
            pid=os.getpid(),
            launcher=os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0,
            started=os.environ.get("PIPELINE_STARTED", ""),
        )
        self.master = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "0"))
        self.head = Head(run, config, attempt, self.me)
        self.error: BaseException | None = None
        self.expect("arrived")

    def work(self) -> None:
        """Do all of it; keep what is raised for the main thread."""
        try:
            self._work()
        except BaseException as error:
            self.error = error

    def _work(self) -> None:
        if self.local_rank == 0:
            self.expect("looking around")
            look_around(self.me, self.run.root)
            self.me.file_skew = file_skew(self.head.folder / f".{self.me.node}.clock")
            self.expect("asking nvidia-smi")
            ask_driver(self.me)
        self.expect("importing torch", IMPORT_SECONDS)
        from pipeline.lm.gathering import Gathering, look_at_build, look_at_gpus

        gathering = None
        if self.attempt.rank == 0:
            if self.attempt.world_size > 1:
                gathering = Gathering(*self.master, self.timeout, listen=True)
            self.head.token.write_text(self.me.started, encoding="utf-8")
        self.expect("looking at the GPUs")
        self.me.torch, self.me.cuda_build = look_at_build()
        self.me.cuda, self.me.gpus, self.me.gpu_uuids = look_at_gpus()
        self.expect("looking for rank 0", self.timeout + CONNECT_SECONDS)
        self._find_rank_0()
        self.me.ready = True
        self._write()
        if self.attempt.world_size == 1:
            self.expect("waiting for the others", self.timeout + LAG_SECONDS)
            self.head.decide(None, [self._rank()], lambda: None)
            return
        if self.me.master is not None and self.me.master.error and self.attempt.rank != 0:
            self.expect("waiting for rank 0's word", self.timeout + LAG_SECONDS)
            threading.Event().wait()  # rank 0 reads of it in the file and leaves a verdict, which ends this
        self._meet(gathering or Gathering(*self.master, self.timeout, listen=False))

    def _find_rank_0(self) -> None:
        """Wait for rank 0's token in the Run's folder and for its port; once one is there, only so long for the other.

        Without either, rank 0 is not there.
        """
        me, began, heard = self.me, time.monotonic(), None
        deadline = began + self.timeout
        sees = reached = False
        while not (sees and reached) and time.monotonic() < deadline:
            sees = sees or self.head.sees_token()
            if not reached and self.attempt.world_size > 1:
                me.master = connect(*self.master)
            reached = me.master is None or not me.master.error
            if sees != reached:
                heard = heard or time.monotonic()
                # Before rank 0 gives this node up: what is wrong here says more than that it said nothing.
                deadline = min(deadline, heard + min(CONNECT_SECONDS if sees else LAG_SECONDS, self.timeout / 2))
            time.sleep(0 if sees and reached else POLL_SECONDS)
        me.sees_token = sees
        if me.master is not None:
            me.master.seconds = time.monotonic() - (heard or began)
            if not sees and not reached:
                head = expected_nodes()[:1]
                raise BadNodesError(
                    f"rank 0 ({', '.join(head) or 'on a node that is not known'}) did not arrive within "
                    f"{self.timeout:g} s: {me.node} finds no file of it in {self.head.folder}, and no connection to "
                    f"{me.master.name}:{me.master.port} ({', '.join(me.master.addresses) or 'no address'}): "
                    f"{me.master.error} [errno {me.master.errno}]",
                    blamed_nodes([Fault(name, "absent") for name in head], [me.node]),
                )

    def _rank(self) -> RankRecord:
        uuid = self.me.gpu_uuids[self.local_rank] if self.local_rank < len(self.me.gpu_uuids) else ""
        return RankRecord(
            rank=self.attempt.rank,
            local_rank=self.local_rank,
            world_size=self.attempt.world_size,
            local_world_size=self.local_world_size,
            node=self.me.node,
            pid=self.me.pid,
            launcher=self.me.launcher,
            device=f"GPU {uuid}" if uuid else f"{'cuda' if self.me.cuda else 'cpu'}:{self.local_rank}",
            cpus=affinity(),
            variables=own_variables(),
        )

    def _meet(self, gathering: Gathering) -> None:
        """Check in with rank 0; do what it says."""
        if self.local_rank == 0:
            gathering.append("node", self.me.model_dump_json())
        gathering.append("rank", self._rank().model_dump_json())
        if self.attempt.rank == 0:
            self.expect("waiting for the others", self.timeout + LAG_SECONDS)
            self.head.decide(gathering, [], lambda: self._measure(gathering))
            return
        self.expect("waiting for rank 0's word", self.timeout + LAG_SECONDS)
        told = float(gathering.hear("clock"))
        if self.local_rank == 0:
            gathering.append("skew", f"{self.me.node} {time.time() - told}")
        if gathering.hear("result") == "go":
            self._measure(gathering)
        gathering.append("finished")  # from here on neither the store nor the folder is needed

    def _measure(self, gathering: Gathering) -> AllReduce:
        """Time an all-reduce between the ranks of each node, and one over all of them."""
        self.expect("joining the process group")
        from pipeline.lm import all_reduce

        rank, size = self.attempt.rank, self.attempt.world_size
        device = f"cuda:{self.local_rank}" if self.me.cuda else "cpu"
        try:
            all_reduce.join(gathering.store, rank, size, device, self.timeout)
            self.expect("all-reduce")
            first = rank - self.local_rank
            local = all_reduce.time_node(device, list(range(first, first + self.local_world_size)))
            timed = all_reduce.time_all(device)
        except Exception as error:
            raise self._network_error(error) from error
        self.expect("done")
        if self.local_rank == 0 and local is not None:
            gathering.append("local", f"{self.me.node} {local.bus_gbps}")
        all_reduce.leave()
        return AllReduce(backend=timed.backend, bytes=timed.bytes, seconds=timed.seconds, bus_gbps=timed.bus_gbps)

    def _network_error(self, error: Exception) -> BadNodesError:
        """Say where an error came up. Its words blame no node: a wrong variable fails on whichever node is first."""
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        if any(word in text for word in BROKEN):  # only says that another rank is gone
            time.sleep(BROKEN_SECONDS)
        return BadNodesError(f"rank {self.attempt.rank} on {self.me.node}, in {self.me.doing}: {text}", [])

    def overdue(self) -> None:
        """End an attempt in which something hangs. Rank 0 speaks for all; another one, if rank 0 does not."""
        doing = self.me.doing
        if self.attempt.rank == 0:
            self.head.give_up()
        text = f"rank {self.attempt.rank} on {self.me.node} got no further than: {doing}"
        if doing in WITH_OTHERS:
            faults, text = [Fault(name, "absent") for name in expected_nodes()[:1]], f"{text}; and rank 0 said nothing"
        else:
            faults = [Fault(node.node, "absent") for node in self.head.records() if not node.ready]
        raise BadNodesError(text, blamed_nodes(faults, [node.node for node in self.head.records()]))

    def expect(self, doing: str, seconds: float | None = None) -> None:
        """Say what comes next, and how long it may take."""
        self.me.doing = doing
        self.deadline = time.monotonic() + (self.timeout if seconds is None else seconds)
        self._write()

    def _write(self) -> None:
        if self.local_rank == 0:
            name = f"{self.me.node}.{self.me.rank}.{self.me.pid}.json"
            write_json(self.head.folder / name, self.me.model_dump())


if __name__ == "__main__":
    leave(run_stage("preflight", preflight, owns=False))  # a thread may still hang
