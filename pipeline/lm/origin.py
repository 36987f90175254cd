"""What a training comes from, as its checkpoints record it: tokens, tokenizer and the Config's part in it.

Other tokens or another tokenizer than those of the checkpoint are refused; what else has changed since is told.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pipeline.config.digest import default_values
from pipeline.config.schema import Config
from pipeline.errors import UserError
from pipeline.lm.shards import TokenShards

CONFIG_KEYS = ("seed", "model", "pretrain")
FIXED = {"tokens": "other token shards", "tokenizer": "another tokenizer"}


def origin(config: Config, shards: TokenShards) -> dict[str, Any]:
    """Return what the manifest of every checkpoint says of where it comes from."""
    hashes = json.dumps([shard.sha256 for shard in shards.shards])
    wanted = config.model_dump(mode="json")
    return {
        "tokens": hashlib.sha256(hashes.encode()).hexdigest(),
        "tokenizer": shards.tokenizer_fingerprint,
        "config": {key: wanted[key] for key in CONFIG_KEYS},
    }


def changes(checkpoint: Path, manifest: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List what is not as it was when a checkpoint was made. Raises UserError where training cannot go on from it."""
    for key, what in FIXED.items():
        if key in now:
            _check_fixed(checkpoint, manifest, key, what, now[key])
    then, since = _flat(manifest.get("config")), _flat(now.get("config"))
    if not then or not since:
        return []
    then = {name: value for name, value in _defaults().items() if name in since} | then  # keys younger than it
    names = [name for name in {**then, **since} if then.get(name) != since.get(name)]
    return [f"{name}: {_text(then.get(name))} -> {_text(since.get(name))}" for name in names]


def check_tokenizer(checkpoint: Path, manifest: dict[str, Any], fingerprint: str) -> None:
    """Raise UserError where a checkpoint was trained with another tokenizer than that of `fingerprint`."""
    _check_fixed(checkpoint, manifest, "tokenizer", FIXED["tokenizer"], fingerprint)


def _check_fixed(checkpoint: Path, manifest: dict[str, Any], key: str, what: str, now: str) -> None:
    then = manifest.get(key, now)  # a checkpoint of an older version may not say
    if then != now:
        raise UserError(
            f"{checkpoint}: it was trained with {what} ({str(then)[:12]}) than the Run's data folder has now "
            f"({now[:12]}). Put the former files back, or give the Run a new name"
        )


def _defaults() -> dict[str, Any]:
    return _flat({key: value for key, value in default_values(Config).items() if key in CONFIG_KEYS})


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return a nested dict's values by key path."""
    if not isinstance(value, dict):
        return {name: value} if name else {}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= _flat(inner, f"{name}.{key}" if name else key)
    return found


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
