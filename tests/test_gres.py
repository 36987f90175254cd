"""GPUs as Slurm writes them, by one grammar, wherever they are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import Fake

from pipeline.cluster.init import init_cluster
from pipeline.cluster.load import load_cluster
from pipeline.cluster.schema import Cluster
from pipeline.slurm.commands import Slurm
from pipeline.slurm.gres import gpus_in
from pipeline.slurm.window import nodes_from

KINDS = ["2080ti", "3090", "1g.10gb", "h100", "a100_1g.5gb", "nvidia_h100_80gb_hbm3_1g.10gb+me", "tesla-v100"]
FORMS = {
    "gpu:{}:4": 4,
    "gpu:{}:4(S:0-1)": 4,
    "gpu:{}:2(IDX:0,3)": 2,
    "shard:{}:64,gpu:{}:8(S:0,2),nic:mlx5:2": 8,
    "gpu:{}:no_consume:4": 4,
    "gpu:{}:2K": 2048,
    "gres:gpu:{}:4": 4,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_type_and_number_are_read(form: str, kind: str) -> None:
    assert gpus_in(form.format(kind, kind)) == [(kind, FORMS[form])]


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:2080ti", [("2080ti", 1)]),
        ("gpu:(null):3(IDX:0-2)", [("", 3)]),
        ("gpu:(null):0(IDX:N/A)", [("", 0)]),
        ("gpu:0", [("", 0)]),
        ("gpu:no_consume:4", [("", 4)]),
        ("gpu:1g.10gb:7(S:0),gpu:2080ti:1,gpu:3", [("1g.10gb", 7), ("2080ti", 1), ("", 3)]),
        ("gpus:4", []),
        ("(null)", []),
        ("N/A", []),
    ],
)
def test_other_forms(gres: str, gpus: list[tuple[str, int]]) -> None:
    assert gpus_in(gres) == gpus


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_free_on_a_node_is_counted(kind: str) -> None:
    (node,) = nodes_from(f"n1|mixed|2/6/0/8|gpu:{kind}:4(S:0-1)|gpu:{kind}:1(IDX:2)|main|")
    assert node.gpus == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_cluster_file_says_what_sinfo_says(fake: Fake, tmp_path: Path, kind: str) -> None:
    fake("sinfo", f"echo 'cpu*|up|1:00:00|4|64|256000|(null)'; echo 'gpu|up|1:00:00|4|64|256000|gpu:{kind}:4(S:0)'")
    fake("scontrol", "echo 'ClusterName = ours'")
    init_cluster(tmp_path / "ours.yaml", Slurm())
    written = load_cluster(tmp_path / "ours.yaml", "/env/bin/python")
    assert (written.gpus_per_node, written.gpu_type) == (4, kind)
    assert written.sbatch_options("pretrain", gpus=4)["gres"] == f"gpu:{kind}:4"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", ["", "gpu:"])
def test_type_and_number_in_one_are_told_apart(prefix: str, kind: str) -> None:
    with pytest.raises(ValueError, match="is type and number in one") as error:
        Cluster.model_validate({"name": "x", "gpus_per_node": f"{prefix}{kind}:8"})
    assert f"write gpus_per_node: 8 and gpu_type: {kind}" in str(error.value)


def test_the_cluster_of_a_person_who_works_on_one_of_several_is_written_down(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("sinfo", "[[ $1 = --clusters=gpu2 ]] && echo 'main*|up|1:00:00|4|64|256000|gpu:h100:4'")
    fake("scontrol", "echo 'ClusterName = gpu2'")
    monkeypatch.setenv("SLURM_CLUSTERS", "gpu2")
    init_cluster(tmp_path / "ours.yaml", Slurm())
    assert load_cluster(tmp_path / "ours.yaml", "/env/bin/python").cluster == "gpu2"
