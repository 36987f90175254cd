"""The model as this rank trains it: compiled, recomputing, replicated (DDP) or sharded (FSDP2), as the Config says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pipeline.config.schema import Config
from pipeline.lm.hardware import Hardware
from pipeline.lm.model import Transformer

# Products and attention are nearly all of a layer's time; the rest is a third of its memory and cheap to make again.
KEPT_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def build_model(config: Config, hardware: Hardware, document_end: int | None = None) -> tuple[Transformer, nn.Module]:
    """Return the model with its first weights, and the module to call: the model, or what wraps it.

    With `document_end` a token sees only its own document.

    Sharded, no rank ever holds the whole: it is built without memory, cut, and filled part by part, with the same
    numbers on any number of ranks.
    """
    sharded = hardware.world_size > 1 and config.pretrain.parallel != "ddp"
    with torch.device("meta" if sharded else "cpu"):
        model = Transformer(
            config.model, config.tokenize.vocab_size, config.pretrain.sequence_length, document_end=document_end
        )
    for block in model.model.layers:
        prepare_block(block, config.pretrain.activation_checkpointing, compiled=hardware.compile)
    if hardware.compile:
        model.whole_loss, model.chunk_loss = torch.compile(model.whole_loss), torch.compile(model.chunk_loss)
    if sharded:
        _shard(model, make_mesh(config, hardware), hardware)
        model.to_empty(device=hardware.device)
        model.init_weights(config.seed)
        return model, model
    model.init_weights(config.seed)
    model.to(hardware.device)
    if hardware.world_size == 1:
        return model, model
    return model, DistributedDataParallel(model, gradient_as_bucket_view=True)


def prepare_block(block: nn.Module, recomputes: str, *, compiled: bool) -> None:
    """Have a layer recompute its activations, and compile it.

    Its forward method is replaced, not the module: names and hooks stay. Layers are compiled one by one, and as they
    are alike the first one's code serves all: a sixth of the time that the whole model would take.
    """
    forward: Callable[..., Any] = block.forward
    if recomputes != "none":
        more: dict[str, Any] = {"context_fn": _keep_products} if recomputes == "selective" else {}
        forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, **more)
    if compiled:
        forward = torch.compile(forward)
    if forward != block.forward:
        setattr(block, "forward", forward)  # noqa: B010 - a method cannot be assigned to in mypy's eyes


def _keep_products() -> Any:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def make_mesh(config: Config, hardware: Hardware) -> DeviceMesh:
    """Lay out the ranks: all in one row (fsdp), or one row per node, each with a whole model (hsdp)."""
    kind = hardware.device.partition(":")[0]
    ranks, on_node = hardware.world_size, hardware.local_world_size
    if config.pretrain.parallel == "hsdp" and ranks > on_node > 1:
        return init_device_mesh(kind, (ranks // on_node, on_node), mesh_dim_names=("replicas", "shards"))
    return init_device_mesh(kind, (ranks,), mesh_dim_names=("shards",))


def _shard(model: Transformer, mesh: DeviceMesh, hardware: Hardware) -> None:
    """Shard every layer by itself, and embedding, head and last norm together: the loss reads the head's weight."""
    low = torch.bfloat16 if hardware.precision == "bf16" else None
    # Inputs are not cast: the rotary tables stay in fp32.
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def whole(tensor: Tensor) -> Tensor:
    """Return a scalar that is summed up over the ranks, where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
