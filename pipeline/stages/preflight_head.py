"""What rank 0 does in a preflight: gather what the nodes tell, judge it, tell the others, report."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.schema import Config
from pipeline.errors import BadNodesError
from pipeline.files import write_json
from pipeline.plan.sizes import checkpoint_bytes
from pipeline.preflight.findings import (
    AllReduce,
    NodeRecord,
    RankRecord,
    Report,
    Wanted,
    read_valid_records,
    table,
)
from pipeline.preflight.merge import judge, judge_hang
from pipeline.preflight.node import expected_nodes, expected_variables
from pipeline.run.folder import Run
from pipeline.slurm.gres import registered_gres
from pipeline.stages.main import Attempt

if TYPE_CHECKING:  # torch is imported when the node has told what it can without it
    from pipeline.lm.gathering import Gathering

POLL_SECONDS = 0.2
LAG_SECONDS = 60.0  # how long a file may take to be seen on other nodes: NFS caches folders that long
REPORT_SECONDS = 10.0  # for the other ranks to answer, and to finish before store and folder are gone


class Head:
    """The part of rank 0; the other ranks use its paths only."""

    def __init__(self, run: Run, config: Config, attempt: Attempt, me: NodeRecord) -> None:
        self.run, self.config, self.attempt, self.me = run, config, attempt, me
        self.folder = run.preflight_records(attempt.job_id, attempt.number)
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def token(self) -> Path:
        """What every node has to see in the Run's folder."""
        return self.folder / "token"

    def sees_token(self) -> bool:
        """Tell whether rank 0's token is seen from here."""
        look = self.folder / f".{self.me.node}.{self.me.pid}.look"
        try:
            look.touch()  # a change of one's own makes NFS look at the folder anew
            look.unlink()
            return self.token.read_text(encoding="utf-8") == self.me.started
        except OSError:
            return False

    def decide(
        self, gathering: Gathering | None, own: list[RankRecord], measure: Callable[[], AllReduce | None]
    ) -> None:
        """Gather, judge, tell the others, have all measure, report. Without a gathering the `own` rank is alone."""
        nodes, ranks, timed_out = self._gather(gathering, own)
        if gathering is not None and not timed_out:
            self._compare_clocks(gathering, nodes)
        report = judge(nodes, ranks, self.wanted(), timed_out=timed_out)
        if gathering is not None:
            gathering.tell("clock", repr(time.time()))  # for those who still wait for it
            gathering.tell("result", "failed" if report.errors else "go")
        if not report.errors:
            timed = measure()
            if gathering is not None and self.config.pretrain.nproc_per_node > 1:
                rates = dict(text.split() for text in gathering.wait_for("local", len(nodes), REPORT_SECONDS))
                for node in nodes:
                    node.local_gbps = float(rates[node.node]) if node.node in rates else None
            report = judge(nodes, ranks, self.wanted(), timed)
        if gathering is not None:
            gathering.wait_for("finished", len(ranks) - 1, REPORT_SECONDS)
        self._finish(report)

    def give_up(self) -> None:
        """Report on an attempt in which something hangs, and raise. The store may be held by the thread that hangs."""
        self._finish(judge_hang(self.records(), self.wanted(), self.me.doing))

    def records(self) -> list[NodeRecord]:
        """Return what the nodes of this attempt have written about themselves."""
        return read_valid_records(self.folder, NodeRecord, lambda record: record.started == self.me.started)

    def _gather(
        self, gathering: Gathering | None, own: list[RankRecord]
    ) -> tuple[list[NodeRecord], list[RankRecord], bool]:
        """Wait until all are there, or the time is over; return nodes, ranks and whether it is over."""
        deadline = time.monotonic() + self.config.preflight.timeout
        unseen_since: float | None = None
        while True:
            nodes, ranks = self._collect(gathering, own)
            now = time.monotonic()
            unseen_since = (unseen_since or now) if any(not node.is_seen for node in nodes) else None
            lagging = unseen_since is not None and now < unseen_since + LAG_SECONDS
            ready = all(node.ready for node in nodes) and {node.node for node in nodes}.issuperset(expected_nodes())
            cut_off = any(node.master is not None and node.master.error for node in nodes)  # its ranks never check in
            if ready and not lagging and (len(ranks) >= self.attempt.world_size or cut_off):
                return nodes, ranks, False
            if now > deadline:
                return nodes, ranks, True
            time.sleep(POLL_SECONDS)

    def _collect(self, gathering: Gathering | None, own: list[RankRecord]) -> tuple[list[NodeRecord], list[RankRecord]]:
        """Read the nodes' files, and what has arrived by the store."""
        nodes = self.records()
        if gathering is None:
            return nodes, own
        seen = {(node.node, node.pid) for node in nodes}
        for text in gathering.read("node"):
            node = NodeRecord.model_validate_json(text)
            if (node.node, node.pid) not in seen:
                node.is_seen = False
                nodes.append(node)
        return nodes, [RankRecord.model_validate_json(text) for text in gathering.read("rank")]

    def _compare_clocks(self, gathering: Gathering, nodes: list[NodeRecord]) -> None:
        gathering.tell("clock", repr(time.time()))
        skews = dict(text.split() for text in gathering.wait_for("skew", len(nodes) - 1, REPORT_SECONDS))
        for node in nodes:
            skew = 0.0 if node.node == self.me.node else skews.get(node.node)
            node.skew = None if skew is None else float(skew)

    def wanted(self) -> Wanted:
        """Return what the config, the batch shell and the launch file ask for."""
        run, config, attempt, nodes = self.run, self.config, self.attempt, expected_nodes()
        sinfo = run.sinfo(attempt.job_id, attempt.number)
        text = sinfo.read_text(encoding="utf-8", errors="replace") if sinfo.is_file() else ""
        given = config.preflight.min_free_bytes
        return Wanted(
            limits=config.preflight,
            nproc_per_node=config.pretrain.nproc_per_node,
            free_bytes=checkpoint_bytes(config) * (config.pretrain.keep_last + 1) if given is None else given,
            world_size=attempt.world_size,
            nodes=nodes,
            gpus_per_node=int(os.environ.get("PIPELINE_GPUS_PER_NODE") or 0),
            gres=registered_gres(text, nodes),
            variables=expected_variables(),
        )

    def _finish(self, report: Report) -> None:
        """Write and print the report; raise if a node is unfit."""
        text = table(report)
        print(text, flush=True)
        about = {"job_id": self.attempt.job_id, "attempt": self.attempt.number, "time": time.time()}
        path = self.run.preflight(self.attempt.job_id, self.attempt.number)
        write_json(path, about | report.to_json() | {"table": text})
        shutil.rmtree(self.folder, ignore_errors=True)
        if report.errors:
            raise BadNodesError("\n".join(str(finding) for finding in report.errors), report.bad_nodes)
