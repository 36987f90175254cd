"""The config's JSON Schema for editors, and its reference for people: both come from the sections themselves."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.cluster.network import PROFILES
from pipeline.cluster.parts import Options
from pipeline.cluster.schema import Cluster
from pipeline.config.errors import choices_of, example_of, range_of
from pipeline.config.evaluate import GateRule
from pipeline.config.hints import section_in
from pipeline.config.load import FREE_KEYS, FREE_OF_EVALUATE, FREE_SECTIONS
from pipeline.config.schema import Config
from pipeline.config.tokenize import DataSource
from pipeline.config.yaml12_dump import dump_scalar

INTRODUCTION = """\
# Config reference

<!-- Written by pipeline/config/docs.py. Change the descriptions in pipeline/config/, then write this file again:
     python -c 'from pipeline.config.docs import config_reference as r; print(r(), end="")' > docs/config.md -->

A config is one YAML file. Only `name` has no default:

```yaml
name: my-model
data: /data/text/*.jsonl
pretrain:
  max_steps: 20000
  learning_rate: 3e-3
  time: 12:00:00
```

Each key can also be set on the command line, as `key.path=value`: `pretrain.max_steps=100`, `data='[a.txt, b.txt]'`.
What stands there wins over the file, and a later one wins over an earlier one.

**How values are read.** By YAML 1.2: `1e-4` is a number, `no` is a word, `12:00:00` is a time. `true`, `null` and
numbers are not text: put quotes around them where text is meant (`name: "007"`). Unknown keys, keys written twice,
tags, anchors and aliases are mistakes. All mistakes of a file are shown at once, before anything is submitted.

**Paths.** In `data`, `tokenize.tokenizer`, `pretrain.init_from`, `inference.prompts_file` and the `path` of a Benchmark
a relative path means the folder in which the command is typed. `~`, `~user`, `$NAME` and `${NAME}` are filled in, and
`$$` is a dollar sign; a variable that is not set is a mistake.

"""

DATA = """
One source, or a list of them. A source is a text or a mapping of the keys below:

```yaml
data: python-stdlib                  # the Python files of the standard library: no download
data: /data/text/**/*.jsonl.zst      # a file, a glob or a folder
data: hf:owner/name                  # a dataset on the Hugging Face hub
data:
  - path: ~/books
  - {dataset: owner/name, config: en, split: train, text_field: content}
data:                                # three sequences of code for one of prose, whatever their sizes
  - {path: /data/code/*.jsonl, weight: 3}
  - {path: /data/prose/*.jsonl, weight: 1}
```

A path that exists is taken as it is; only then is it a glob. Exactly one of `path` and `dataset` is needed.
"""


NETWORKS = "\n".join(
    ["| network | variables |", "|---|---|"]
    + [
        f"| `{name}` | " + ", ".join(f"`{key}={value}`" for key, value in profile.items()) + " |"
        for name, profile in PROFILES.items()
    ]
)

CLUSTER = f"""
Where a config is run is another YAML file, read by the same rules: `--cluster FILE`. Nothing in it has to be given:

```yaml
scheduler: slurm
sbatch: {{partition: gpu, account: my-group}}
gpus_per_node: 8
network: infiniband
```

[configs/clusters/example.yaml](../configs/clusters/example.yaml) has more, with comments; `python -m pipeline init
--cluster` writes one from what a Slurm says about itself.

**Options of Slurm.** `sbatch` and `srun`, here and in a config, take Slurm's long options without the dashes. Values
are passed on as they are typed (`08:00:00`, `0123`, `gpu:h100:8`); `true` stands for an option that takes no value.
Options that the plan sets itself are refused, with the key to write instead. The config's win over the cluster's.

**Networks.** Each profile sets variables, over which `env` wins. NCCL's filters match the beginning of a name unless
they start with `=`: `NCCL_IB_HCA: mlx5_1` means `mlx5_10` as well, `=mlx5_1` only itself; `^` excludes. Gloo takes one
whole name: where `NCCL_SOCKET_IFNAME` is one, it becomes `GLOO_SOCKET_IFNAME` too.

{NETWORKS}
"""


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a config file."""
    schema = Config.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def config_reference() -> str:
    """Return docs/config.md: a table of key, type, default and meaning for the top level and for each section."""
    config = [*_table("Top level", Config, ""), *_sections(Config)]
    cluster = [*_table("Cluster file", Cluster, CLUSTER), *_sections(Cluster)]
    return "\n".join([INTRODUCTION + _changing(), *config, *cluster]) + "\n"


def _changing() -> str:
    """Tell which keys of an existing Run may change."""
    sections = " and ".join(f"`{name.rstrip('.')}`" for name in FREE_SECTIONS)
    keys = ", ".join(f"`{key}`" for key in sorted(FREE_KEYS | FREE_OF_EVALUATE))
    text = (
        f"**Changing an existing Run.** These keys may change: each `time`, `sbatch` and `srun`, all of {sections}, "
        f"{keys}, and `pretrain.max_steps` upward. All others need a new `name`."
    )
    return textwrap.fill(text, 118, break_on_hyphens=False, break_long_words=False) + "\n"


def _sections(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        section = section_in(field.annotation)
        if section is not None:
            text = DATA if section is DataSource else f"\n{section.__doc__}\n"
            yield from _table(f"`{name}`" + (" in the cluster file" if model is Cluster else ""), section, text)
            for key, item in _items(section):
                yield from _table(f"`{name}.{key}`, each item", item, f"\n{item.__doc__}\n")


def _items(section: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the keys of a section that hold lists of mappings, and what is in each."""
    for key, field in section.model_fields.items():
        if "list" in str(field.annotation) and (item := section_in(field.annotation)):
            yield key, item


def _table(title: str, section: type[BaseModel], text: str) -> Iterator[str]:
    yield f"## {title}\n{text}"
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in section.model_fields.items():
        inner = section_in(field.annotation)
        if inner in (None, DataSource, Options) or "list" in str(field.annotation):
            cells = (f"`{name}`", _type(field), _default(field), field.description or "")
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _type(field: FieldInfo) -> str:
    annotation = field.annotation
    words = choices_of(annotation)
    text = str(annotation)
    if section_in(annotation) is Options:
        return "`sbatch` and `srun`"
    if section_in(annotation) is GateRule:
        return "list of mappings"
    if section_in(annotation):
        return "text, mapping or list"
    if "dict" in text:
        return "names with values, as text"
    if "tuple" in text:
        return "two numbers"
    if words:
        words += ["true", "false"] if "bool" in text else []
        return ("list of " if "list" in text else "") + ", ".join(f"`{word}`" for word in words)
    kinds = {"bool": "`true` or `false`", "int": "whole number", "float": "number"}
    kind = next((kind for name, kind in kinds.items() if name in text), "text")
    kind = "list of texts, or text" if "list" in text else kind
    bounds = range_of(field)
    return f"{kind}, {bounds}" if bounds else kind


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "none: required"
    if field.default_factory is not None:
        return "the submitting one"
    if isinstance(field.default, BaseModel):
        return "`{}`"
    if isinstance(field.default, list) and section_in(field.annotation) is not DataSource:
        return f"`[{', '.join(getattr(item, 'name', str(item)) for item in field.default)}]`"
    if isinstance(field.default, list | tuple):
        return f"`{example_of(field)}`"
    return f"`{dump_scalar(field.default)}`"
