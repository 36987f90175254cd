"""Programs beside the chain run as inference's Jobs do: the same launch line, options and environment."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes import Fake, calls

from pipeline.cluster.load import open_cluster
from pipeline.config.load import load_config
from pipeline.errors import NotReadyError, UserError
from pipeline.files import write_json
from pipeline.inference.exporting import export
from pipeline.inference.generate import Wish, elsewhere, generate
from pipeline.plan.jobs import make_plan
from pipeline.run.folder import Run
from pipeline.submit.aside import run_aside
from pipeline.submit.run_folder import prepare, run_of

CLUSTER = "scheduler: slurm\ngpus_per_node: 8\nsbatch: {partition: gpu, account: lm}\nsrun: {mpi: pmix}\n"


@pytest.fixture
def run(tmp_path: Path, micro: Path) -> Run:
    """Return a Run that was planned for a cluster and has a checkpoint of step 3."""
    (tmp_path / "ours.yaml").write_text(CLUSTER)
    config, cluster = (
        load_config(micro, ["inference.time=20"]),
        open_cluster(str(tmp_path / "ours.yaml"), sys.executable),
    )
    made = run_of(config)
    prepare(made, config, make_plan(config, cluster, made), cluster)
    write_json(made.checkpoint(3) / "manifest.json", {"step": 3})
    return made


def wish(run: Run, *prompts: str, **changes: Any) -> Wish:
    keys: dict[str, Any] = {"overrides": [], "file": None, "step": None, "json": False} | changes
    return Wish.read(run.root, prompts=prompts, **keys)


def test_on_a_cluster_it_is_an_allocation_with_inferences_options(run: Run, fake: Fake) -> None:
    fake("srun", "cat > given.json; printenv PYTHONPATH HF_HUB_OFFLINE > environment; exit 7")
    assert generate(wish(run, "def ", overrides=["temperature=0"])) == 7
    (words,) = calls("srun")
    for word in (
        "--quiet --unbuffered",
        "--time=0-00:20:00",
        "--gres=gpu:1",
        "--partition=gpu",
        "--account=lm",
        "--mpi=pmix",
        "--ntasks=1",
    ):
        assert word in words
    assert words.endswith(f"{sys.executable} -u -m pipeline.stages.generate {run.root}")
    given = json.loads(Path("given.json").read_text())
    assert given == {"step": 3, "prompts": ["def "], "overrides": ["inference.temperature=0"], "stream": True}
    assert Path("environment").read_text().split() == [str(run.snapshot), "1"]
    assert export(run.root, None, "bf16") == 7
    assert calls("srun")[1].endswith(f"-m pipeline.stages.export {run.root} 3 bf16")


def test_what_cannot_be_done_is_said_before_anything_is_started(run: Run, fake: Fake) -> None:
    with pytest.raises(UserError, match="--precision int4: write fp32 or bf16"):
        export(run.root, None, "int4")
    with pytest.raises(UserError, match="step 4: no checkpoint of it is there; there are 3"):
        export(run.root, 4, "fp32")
    with pytest.raises(UserError, match=r"inference.top_p: 1.1 is out of range"):
        generate(wish(run, "x", overrides=["top_p=1.1"]))
    with pytest.raises(UserError, match=r"--prompt 2: an empty prompt"):
        wish(run, "x", "")
    (run.checkpoint(3) / "manifest.json").unlink()
    with pytest.raises(NotReadyError, match="no checkpoint yet"):
        export(run.root, None, "fp32")
    (run.snapshot / "pipeline" / "stages" / "export.py").unlink()
    with pytest.raises(UserError, match="of an older version, which has no export"):
        run_aside(run, load_config(run.config), "export", [])
    assert calls("srun") == []


def test_prompts_reach_a_run_elsewhere_by_standard_input(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a\\n b"}\n{"prompt": "c"}\n')
    several = wish(run, file=tmp_path / "prompts.jsonl", overrides=["seed=3"], step=3)
    one = wish(run, "x" * 200_000 + "\n")
    for wanted, named in ((several, ["inference.seed=3", "--file=-.jsonl", "--step=3", "--json"]), (one, ["--file=-"])):
        words, given = elsewhere(wanted)
        assert words == named  # no prompt among what `ps` shows everybody there
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
        read = wish(
            run, file=Path(next(w for w in words if w.startswith("--file=")).removeprefix("--file=")),
            overrides=wanted.overrides, step=wanted.step, json="--json" in words,
        )  # fmt: skip
        assert read == wanted
