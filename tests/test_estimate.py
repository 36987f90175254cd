"""What a Config costs: the arithmetic agrees with real models, and every shipped config builds and fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROJECT
from test_plan import LAPTOP

from pipeline.config.load import ConfigError, load_config
from pipeline.config.rules import USABLE
from pipeline.config.schema import Config
from pipeline.lm.model import Transformer
from pipeline.lm.optim import build_optimizers
from pipeline.plan import sizes
from pipeline.plan.estimate import estimate
from pipeline.plan.jobs import MisfitError, make_plan
from pipeline.run.folder import Run

CONFIGS = sorted((PROJECT / "configs").glob("*.yaml"))


def build(config: Config) -> Transformer:
    return Transformer(config.model, config.tokenize.vocab_size, config.pretrain.sequence_length)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_config_builds_and_fits(path: Path) -> None:
    config = load_config(path)
    with torch.device("meta"):
        model = build(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == sizes.num_parameters(config.model, config.tokenize.vocab_size)
    memory, parts = sizes.memory(config), sizes.shards(config)
    assert memory.weights * parts == 4 * count
    moments = sum(
        (1 if type(optimizer).__name__ == "SharedMuon" else 2) * parameter.numel()
        for optimizer in build_optimizers(model, config.pretrain)
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    assert memory.optimizer * parts == 4 * moments
    assert sizes.checkpoint_bytes(config) == 4 * (count + moments)
    if config.pretrain.memory_gb:
        assert memory.total < USABLE * config.pretrain.memory_gb * 1e9


def test_what_needs_more_than_the_stated_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "8b.yaml"
    path.write_text((PROJECT / "configs" / "8b.yaml").read_text().replace("parallel: fsdp", "parallel: ddp"))
    with pytest.raises(ConfigError, match=r"8b\.yaml:\d+: pretrain\.memory_gb: a rank would need about 1\d\d\.\d GB"):
        load_config(path)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_activations_are_those_that_layers_keep(precision: str) -> None:
    one, two = config_of(1, precision), config_of(2, precision)
    reckoned = sizes.tokens_per_pass(two) * (sizes.activation_bytes(two) - sizes.activation_bytes(one))
    assert kept_bytes(two) - kept_bytes(one) == pytest.approx(reckoned, rel=0.02)


def kept_bytes(config: Config) -> int:
    """Count what autograd keeps of a forward pass, without weights and their copies in bf16."""
    model, ids = build(config), torch.zeros(3, 32, dtype=torch.int64)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = {shape for parameter in model.parameters() for shape in (parameter.shape, parameter.shape[::-1])}
    seen: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights and tensor.shape not in shapes:
            seen[place] = tensor
        return tensor

    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.pretrain.precision == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), autocast:
        model(ids, ids)
    return sum(tensor.untyped_storage().nbytes() for tensor in seen.values())


def config_of(layers: int, precision: str) -> Config:
    model = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": layers, "num_attention_heads": 4}
    pretrain: dict[str, Any] = {"precision": precision, "sequence_length": 32, "global_batch_size": 3}
    return Config.model_validate({"name": "x", "model": model, "pretrain": pretrain})


def test_hours_are_flops_over_what_the_ranks_make() -> None:
    lines = estimate(load_config(PROJECT / "configs" / "8b.yaml"))
    assert lines["training time"] == "53.3 h = 9.72e+21 FLOPs / (128 ranks x 989 TFLOP/s x 40% MFU)"
    assert lines["rank-hours"] == "6,822 = 53.3 h x 128 ranks"
    assert "weights 251\N{NO-BREAK SPACE}MB" in lines["memory per rank"]


def test_a_model_too_large_for_this_machine_is_reckoned_all_the_same() -> None:
    with pytest.raises(MisfitError, match="this machine is one node") as caught:
        make_plan(load_config(PROJECT / "configs" / "8b.yaml"), LAPTOP, Run(Path("/runs/8b")))
    assert caught.value.derived["parameters"].startswith("8,028,172,288 = ")
