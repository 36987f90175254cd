"""A config is accepted as people mean it, or refused with all of its mistakes at once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.config.docs import config_reference, config_schema
from pipeline.config.errors import WORDS, ConfigError, choices_of
from pipeline.config.evaluate import BITS_PER_BYTE, BenchmarkSource, EvaluateConfig, GateRule
from pipeline.config.hints import ELSEWHERE, section_in
from pipeline.config.inference import InferenceConfig
from pipeline.config.load import config_differences, dump_config, load_config, load_run_config
from pipeline.config.preflight import PreflightConfig
from pipeline.config.pretrain import ModelConfig, PretrainConfig
from pipeline.config.schema import Config
from pipeline.config.tokenize import DataSource, TokenizeConfig
from pipeline.config.types import has_control_characters
from pipeline.config.yaml12 import YamlError, parse_document
from pipeline.slurm.options import option_words
from pipeline.slurm.time_limits import canonical_time, time_seconds

ROOT = Path(__file__).parent.parent
PYDANTIC_WORDS = re.compile(r"Input should|validation error|Extra inputs|Field required|\[type=|pydantic")

Load = Callable[..., Config]
Refuse = Callable[..., list[str]]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load a config of the given text from the folder tmp_path, which relative paths mean."""

    def load(text: str = "", *overrides: str) -> Config:
        path = tmp_path / "x.yaml"
        path.write_text(text if "name:" in text else f"name: x\n{text}")
        return load_config(path, overrides, folder=tmp_path)

    return load


@pytest.fixture
def refuse(load: Load, tmp_path: Path) -> Refuse:
    """Load a config that has mistakes; return them, one a line, without the folder."""

    def refuse(text: str = "", *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as error:
            load(text, *overrides)
        message = str(error.value).replace(str(tmp_path) + "/", "")
        assert not PYDANTIC_WORDS.search(message)
        first, *lines = message.splitlines()
        assert first == f"{len(lines)} mistake{'s' if len(lines) > 1 else ''} in x.yaml:"
        return lines

    return refuse


# What is accepted


def test_a_name_is_enough(load: Load) -> None:
    assert load("name: my-model") == Config(name="my-model")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("12:00:00", "0-12:00:00"),  # 43200 for a YAML 1.1 reader
        ("8:00:00", "0-08:00:00"),
        ("1:30", "0-00:02:00"),  # minutes and seconds, rounded up
        ("90", "0-01:30:00"),
        ("1-12", "1-12:00:00"),
        ("1-12:30", "1-12:30:00"),
        ("1-12:30:00", "1-12:30:00"),
        ("08:00:00", "0-08:00:00"),
        ("00:30:00", "0-00:30:00"),
        ("01:30", "0-00:02:00"),
        ("24:00:00", "1-00:00:00"),
        ("3-0:00", "3-00:00:00"),
        ("'90'", "0-01:30:00"),
        ("0:01", "0-00:01:00"),
    ],
)
def test_times(load: Load, written: str, meant: str) -> None:
    assert load(f"pretrain: {{time: {written}}}").pretrain.time == meant
    assert load("", f"pretrain.time={written}").pretrain.time == meant


@given(st.integers(1, 10**6))
def test_canonical_times_stay_as_they_are(minutes: int) -> None:
    text = canonical_time(str(minutes))
    assert canonical_time(text) == text
    assert time_seconds(text) == minutes * 60


@pytest.mark.parametrize(
    ("written", "meant"),
    [("1e-4", 1e-4), ("6e-5", 6e-5), ("1.0e-4", 1e-4), (".5", 0.5), ("'3e-4'", 3e-4), ("1", 1.0), ('"0.1"', 0.1)],
)
def test_numbers(load: Load, written: str, meant: float) -> None:
    value = load(f"pretrain: {{learning_rate: {written}}}").pretrain.learning_rate
    assert (value, type(value)) == (meant, float)


def test_options_of_slurm_are_kept_as_typed(load: Load) -> None:
    config = load(
        "pretrain: {sbatch: {gres: gpu:h100:8, deadline: 08:00:00, mem: 010, nice: 1e3, exclusive: true, qos: no}}",
        "pretrain.sbatch.switches=1@0:10:00",
        "pretrain.srun={cpu-bind: 0x1, send-libs: no}",
    )
    assert config.pretrain.sbatch == {
        "gres": "gpu:h100:8", "deadline": "08:00:00", "mem": "010", "nice": "1e3", "exclusive": "true", "qos": "no",
        "switches": "1@0:10:00",
    }  # fmt: skip
    assert option_words(config.pretrain.srun) == ["--cpu-bind=0x1", "--send-libs=no"]
    assert "--exclusive" in option_words(config.pretrain.sbatch)


@pytest.mark.parametrize("written", ["1000", "1_000", "1e3", "'1000'", "1000.0", "0x3e8"])
def test_whole_numbers(load: Load, written: str) -> None:
    value = load(f"pretrain: {{max_steps: {written}}}").pretrain.max_steps
    assert (value, type(value)) == (1000, int)


def test_data_is_a_text_a_mapping_or_a_list(load: Load, tmp_path: Path) -> None:
    (tmp_path / "my text").mkdir()
    (tmp_path / "my text" / "c.jsonl").touch()
    (tmp_path / "a.txt").touch()
    (tmp_path / "b[1].txt").touch()

    def sources(text: str) -> list[DataSource]:
        return load(f"data: {text}").data

    assert sources("python-stdlib") == [DataSource(path="python-stdlib")]
    assert sources("hf:owner/name") == [DataSource(dataset="owner/name")]
    assert sources("my text") == [DataSource(path=str(tmp_path / "my text"))]
    assert sources("'*.txt'") == [DataSource(path=str(tmp_path / "*.txt"))]
    assert sources("b[1].txt") == [DataSource(path=str(tmp_path / "b[1].txt"))]
    assert sources("{dataset: owner/name, config: en, split: validation}") == [
        DataSource(dataset="owner/name", config="en", split="validation")
    ]
    assert sources("{dataset: owner/name, revision: 0123abc}") == [DataSource(dataset="owner/name", revision="0123abc")]
    assert sources("{dataset: ./my text}") == [DataSource(dataset=str(tmp_path / "my text"))]
    assert sources("[a.txt, {path: b*.txt, text_field: body}, hf:o/n]") == [
        DataSource(path=str(tmp_path / "a.txt")),
        DataSource(path=str(tmp_path / "b*.txt"), text_field="body"),
        DataSource(dataset="o/n"),
    ]


def test_a_single_text_stands_for_a_list(load: Load) -> None:
    config = load('inference: {prompts: "one: two"}\nevaluate: {checkpoints: all}')
    assert config.inference.prompts == ["one: two"]
    assert config.evaluate.checkpoints == ["all"]


def test_words_of_yaml_1_1_are_words(load: Load) -> None:
    assert load("name: no").name == "no"
    assert load("name: on").name == "on"


def test_homes_and_variables_are_filled_in(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "$odd.txt").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PLACE", str(tmp_path))
    for text in ("~/a.txt", "$PLACE/a.txt", "${PLACE}/a.txt", "$PLACE/*.txt"):
        assert load(f"data: {text}").data[0].path == f"{tmp_path}/{text.rpartition('/')[2]}"
    assert load("data: $$odd.txt").data[0].path == f"{tmp_path}/$odd.txt"
    assert load("runs_dir: $PLACE/runs").runs_dir == f"{tmp_path}/runs"
    assert load("runs_dir: mine").runs_dir == "mine"
    assert load("tokenize: {tokenizer: a.txt}").tokenize.tokenizer == f"{tmp_path}/a.txt"


# What is refused: one line of the file, and a part of what is said about it

SECTIONED: dict[str, tuple[str, str]] = {
    # times
    "zero": ("pretrain: {time: 0}", "pretrain.time: 0 gives no time at all; write at least 1 minute"),
    "zero with seconds": ("pretrain: {time: '0:00'}", "'0:00' gives no time at all"),
    "negative": ("pretrain: {time: -5}", "pretrain.time: -5 is not a time limit; write D-HH:MM:SS"),
    "61 minutes": ("pretrain: {time: 25:61:00}", "'25:61:00' is not a time limit: minutes and seconds end at 59"),
    "25 hours of a day": ("pretrain: {time: 1-25}", "hours after days at 23"),
    "word": ("pretrain: {time: 1d}", "'1d' is not a time limit"),
    "endless": ("pretrain: {time: UNLIMITED}", "'UNLIMITED' is not a time limit"),
    "fraction": ("pretrain: {time: 1.5}", "1.5 is not a time limit"),
    "too long": ("pretrain: {time: 9999-00}", "more than ten years"),
    # numbers
    "half a number": (
        "pretrain: {learning_rate: 3e}",
        "pretrain.learning_rate: '3e' is not a number; write for example",
    ),
    ".nan": ("pretrain: {weight_decay: .nan}", "pretrain.weight_decay: .nan is not a finite number"),
    ".inf": ("pretrain: {weight_decay: -.inf}", "-.inf is not a finite number"),
    "overflow": ("pretrain: {weight_decay: 1e999}", "1e999 is not a finite number"),
    "nan": ("pretrain: {weight_decay: nan}", "'nan' is not a number"),
    "bool as number": ("pretrain: {max_steps: true}", "pretrain.max_steps: true is not a whole number"),
    "bool as fraction": ("pretrain: {weight_decay: false}", "false is not a number"),
    "bool as text": ("name: true", "name: true means true or false here, and text is needed; put quotes around it"),
    "text as bool": ("model: {qk_norm: yes}", "'yes' is neither true nor false"),
    "number as bool": ("model: {qk_norm: 1}", "1 is neither true nor false"),
    "octal as text": (
        "name: 0123",
        "name: 0123 means a number here, and text is needed; put quotes around it: '0123'",
    ),
    "version as text": ("inference: {prompts: [3.10]}", "inference.prompts[0]: 3.10 means a number here"),
    "fraction of a step": ("pretrain: {max_steps: 1.5}", "1.5 is not a whole number"),
    "so many digits": ("pretrain: {max_steps: " + "9" * 5000 + "}", "is not a whole number"),
    # keys
    "misspelt": ("pretrain: {learning_rte: 1}", "pretrain.learning_rte: unknown key; did you mean learning_rate?"),
    "hyphens": ("pretrain: {max-steps: 1}", "unknown key; did you mean max_steps?"),
    "upper case": ("Pretrain: {max_steps: 1}", "Pretrain: unknown key; did you mean pretrain?"),
    "misspelt section": ("pretrian: {max_steps: 1}", "pretrian: unknown key; did you mean pretrain?"),
    "other's name": ("pretrain: {lr: 1}", "unknown key; did you mean learning_rate?"),
    "other's name elsewhere": ("n_layers: 3", "unknown key; did you mean model.num_hidden_layers?"),
    "in the wrong section": ("model: {learning_rate: 1}", "unknown key; it belongs under pretrain"),
    "too high": ("learning_rate: 1", "unknown key; it belongs under pretrain"),
    "too low": ("pretrain: {runs_dir: x}", "unknown key; it belongs at the top of the file"),
    "dotted": ("pretrain.max_steps: 5", "unknown key; write max_steps below pretrain:"),
    "nothing near": ("model: {zzzzzz: 1}", "unknown key; remove it; the keys under model are hidden_size"),
    "in a source": (
        "data: [{path: python-stdlib, field: x}]",
        "data[0].field: unknown key; did you mean text_field?",
    ),
    "no blank below": ("pretrain:\n  max_steps:10", "pretrain: 'max_steps:10' is one text, not keys with values"),
    "no blank in braces": ("pretrain: {max_steps:10}", "unknown key; put a blank after the colon"),
    "section as list": ("pretrain: [a]", "pretrain: a list where keys with values are needed"),
    # nothing
    "data": ("data:", "data: has no value; write for example `data: python-stdlib`"),
    "section": ("pretrain:", "pretrain: is an empty section; write keys below it"),
    "number without value": (
        "pretrain: {max_steps: }",
        "pretrain.max_steps: has no value; write for example `max_steps: ",
    ),
    "name without value": ("name: null", "name: has no value; write for example `name: my-model`"),
    "no path": ("data: {path: null}", "data: a mapping needs exactly one of path and dataset"),
    "empty list": ("data: []", "data: a list is an empty list; write for example `data: python-stdlib`"),
    "no prompts": ("inference: {prompts: []}", "write at least one item"),
    "empty prompt": ("inference: {prompts: ['']}", "'' is an empty prompt"),
    "empty text": ("runs_dir: ' '", "runs_dir: ' ' is empty"),
    # ranges
    "no batch": ("pretrain: {global_batch_size: 0}", "0 is out of range; it must be at least 1"),
    "steps": ("pretrain: {max_steps: -1}", "-1 is out of range; it must be at least 1"),
    "vocabulary": ("tokenize: {vocab_size: 0}", "0 is out of range; it must be at least 300 and at most 1000000"),
    "no context": ("pretrain: {sequence_length: 0}", "0 is out of range; it must be at least 2"),
    "keep_last": ("pretrain: {keep_last: 0}", "0 is out of range; it must be at least 1"),
    "rate": ("pretrain: {learning_rate: 0}", "0 is out of range; it must be more than 0"),
    "slip of the finger": ("pretrain: {max_steps: 10000000000000}", "at most 1e12"),
    "three betas": ("pretrain: {betas: [0.9, 0.9, 0.9]}", "pretrain.betas: exactly two numbers are needed"),
    "one beta": ("pretrain: {betas: 0.9}", "0.9 where a list is needed; write for example [0.9, "),
    "beta": ("pretrain: {betas: [0.9, 1]}", "pretrain.betas[1]: 1 is out of range; it must be less than 1"),
    "choice": ("pretrain: {optimizer: sgd}", "'sgd' is not one of muon, adamw; write one of them"),
    "compile": ("pretrain: {compile: 1}", "1 is not one of auto, true, false"),
    "checkpoints": (
        "evaluate: {checkpoints: [frist]}",
        "evaluate.checkpoints[0]: 'frist' is not one of first, last",
    ),
    "a Benchmark of no known name": (
        "evaluate: {benchmarks: [arc]}",
        "evaluate.benchmarks[0]: 'arc' is not one of bits_per_byte, python-docs; write one of them, or a mapping",
    ),
    "a Benchmark without questions": (
        "name: x\nevaluate: {benchmarks: [{name: mine, kind: cloze}]}",
        "evaluate.benchmarks[0]: a mapping needs a path to its questions, or python-docs; add one",
    ),
    "a Benchmark's file": (
        "name: x\nevaluate: {benchmarks: [{name: mine, path: ./none.jsonl}]}",
        "evaluate.benchmarks[0].path: './none.jsonl' is not there: no file",
    ),
    "questions that are none": (
        "name: x\nevaluate: {benchmarks: [{name: mine, path: ./x.yaml}]}",
        "x.yaml:1: not JSON (Expecting value: line 1 column 1 (char 0)); each line is an object, such as",
    ),
    "a Benchmark twice": (
        "evaluate: {benchmarks: [python-docs, python-docs]}",
        "names the Benchmark python-docs twice, whose Scores are one file; give one another name",
    ),
    "a gate without a bound": (
        "evaluate: {gate: [{action: stop}]}",
        "needs exactly one of worse_than_best_by, below and",
    ),
    "a gate on what is not scored": (
        "evaluate: {gate: [{benchmark: arc, below: 0.2}]}",
        "evaluate.gate: a rule is about arc, which is not scored; name one of bits_per_byte, or add it to benchmarks",
    ),
    "none": ("tokenize: {validation_fraction: 0}", "it must be more than 0 and at most 0.5"),
    "all": ("tokenize: {validation_fraction: 1}", "it must be more than 0 and at most 0.5"),
    "temperature": ("inference: {temperature: -1}", "-1 is out of range; it must be at least 0"),
    "temperature nan": ("inference: {temperature: .nan}", ".nan is not a finite number"),
    "top_k": ("inference: {top_k: 0}", "0 is out of range; it must be at least 1"),
    "top_k and vocabulary": (
        "inference: {top_k: 301}\ntokenize: {vocab_size: 300}",
        "inference.top_k: top_k 301 is more than tokenize.vocab_size 300; set top_k to 300 or less",
    ),
    "top_p 0": ("inference: {top_p: 0}", "it must be more than 0 and at most 1"),
    "top_p 1.1": ("inference: {top_p: 1.1}", "it must be more than 0 and at most 1"),
    "max_new_tokens": ("inference: {max_new_tokens: 0}", "it must be at least 1"),
    "seed": ("inference: {seed: 18446744073709551616}", "it must be at least 0 and at most 4294967295"),
    # between keys
    "heads": (
        "model: {hidden_size: 100, num_attention_heads: 6}",
        "model.hidden_size: hidden_size 100 is not a multiple of num_attention_heads 6; set hidden_size to 96 or 108",
    ),
    "odd heads": (
        "model: {hidden_size: 27, num_attention_heads: 9}",
        "27 / num_attention_heads 9 = 3, but the size of a head must be even",
    ),
    "key/value heads": (
        "model: {hidden_size: 96, num_attention_heads: 6, num_key_value_heads: 4}",
        "model.num_key_value_heads: num_attention_heads 6 is not a multiple of num_key_value_heads 4; "
        "set num_key_value_heads to one of 1, 2, 3, 6",
    ),
    "a shortest time above the longest": (
        "pretrain: {time: 1:00:00, time_min: 90}",
        "pretrain.time_min: time_min 0-01:30:00 is more than pretrain.time 0-01:00:00; lower it",
    ),
    "a shortest time that is none": ("pretrain: {time_min: soon}", "pretrain.time_min: 'soon' is not a time limit"),
    "warm-up": (
        "pretrain: {warmup_steps: 11, max_steps: 10}",
        "pretrain.warmup_steps: warmup_steps 11 is more than max_steps 10; set warmup_steps to 10 or less",
    ),
    "decay": (
        "pretrain: {warmup_steps: 60, max_steps: 100, decay_fraction: 0.5, schedule: wsd}",
        "warmup_steps 60 and a decay of 50 steps (decay_fraction 0.5 x max_steps 100) do not fit into max_steps; "
        "set warmup_steps to 50 or less",
    ),
    "batch and micro batch": (
        "pretrain: {global_batch_size: 10, nproc_per_node: 2, micro_batch_size: 4}",
        "pretrain.global_batch_size: 10 sequences cannot be shared out evenly over 2 ranks x micro_batch_size 4 = 8; "
        "set global_batch_size to 8 or 16",
    ),
    "batch by ranks": (
        "pretrain: {global_batch_size: 2, nproc_per_node: 4}",
        "2 sequences cannot be shared out evenly over 4 ranks; set global_batch_size to 4",
    ),
    "batch over nodes": (
        "pretrain: {global_batch_size: 6, nproc_per_node: 2, nodes: 2}",
        "6 sequences cannot be shared out evenly over 4 ranks; set global_batch_size to 4 or 8",
    ),
    "no nodes": ("pretrain: {nodes: 0}", "0 is out of range; it must be at least 1 and at most 100000"),
    "a range of nodes": ("pretrain: {nodes: 1-4}", "'1-4' is not a whole number"),
    "no segments": ("pretrain: {segments: 0}", "0 is out of range"),
    # options of Slurm
    "option of the plan": (
        "pretrain: {sbatch: {nodes: 4}}",
        "pretrain.sbatch.nodes: 'nodes' is set by the plan; write nodes below pretrain",
    ),
    "option in short": ("evaluate: {sbatch: {p: gpu}}", "evaluate.sbatch.p: 'p' is a short option; write partition"),
    "option with dashes": ("evaluate: {sbatch: {--qos: low}}", "'--qos' is written with dashes; write qos"),
    "option abbreviated": ("evaluate: {sbatch: {dep: singleton}}", "'dep' is short for dependency, which is set by"),
    "option with underscores": ("pretrain: {sbatch: {mem_per_cpu: 1G}}", "did you mean mem-per-cpu?"),
    "option of the container": (
        "pretrain: {sbatch: {container-image: x}}",
        "put the job script itself into the container",
    ),
    "option switched off": (
        "pretrain: {sbatch: {exclusive: false}}",
        "'false' is no value of an option; remove the line",
    ),
    "option without value": ("pretrain: {srun: {mpi: }}", "pretrain.srun.mpi: has no value; write one, or true"),
    "option with an empty value": ("pretrain: {srun: {mpi: ''}}", "'' is empty; write a value, or true"),
    "option as list": ("pretrain: {sbatch: {constraint: [a, b]}}", "a list where text is needed"),
    "option with two lines": ('pretrain: {sbatch: {comment-x: "a\\nb"}}', "holds control characters"),
    "options as text": ("pretrain: {sbatch: --qos=x}", "where names with values are needed; write for example {"),
    "option beside sbatch": (
        "pretrain: {partition: gpu}",
        "an option of Slurm goes below sbatch:; write there partition",
    ),
    "option at the top": (
        "partition: gpu",
        "goes below sbatch: of preflight or tokenize or pretrain or evaluate or inference",
    ),
    "context and new tokens": (
        "pretrain: {sequence_length: 64}\ninference: {max_new_tokens: 64}",
        "max_new_tokens 64 and at least one token of prompt are more than pretrain.sequence_length 64; "
        "set max_new_tokens to 63 or less",
    ),
    "stride": (
        "pretrain: {sequence_length: 200}\nevaluate: {stride: 201}",
        "evaluate.stride: stride 201 is more than pretrain.sequence_length 200; set stride to 200 or less",
    ),
    "weights of some": (
        "data: [{path: python-stdlib, weight: 2}, python-stdlib, python-stdlib]",
        "data: some sources have a weight, but item 2, 3 has none; give each source a weight, or none",
    ),
    # paths
    "unset": ("data: $UNSET_X/x", "data: '$UNSET_X/x' uses the variable UNSET_X, which is not set"),
    "empty": ("data: $EMPTY_X/x", "uses the variable EMPTY_X, which is not set"),
    "nobody": ("data: ~no-such-user/x", "begins with ~, but there is no such home folder here"),
    "half": ("data: ${A", "has a $ that begins no variable"),
    "shell": ("data: ${A:-/x}", "has a $ that begins no variable"),
    "runs_dir": ("runs_dir: $UNSET_X/x", "runs_dir: '$UNSET_X/x' uses the variable UNSET_X"),
    "tokenizer": ("tokenize: {tokenizer: $UNSET_X}", "tokenize.tokenizer: '$UNSET_X' uses the variable"),
    "missing": ("data: no.txt", "data: 'no.txt' is not there: no file or folder no.txt; mend the path"),
    "missing in list": ("data: [python-stdlib, no.txt]", "data[1]: 'no.txt' is not there"),
    "missing in mapping": ("data: {path: no.txt}", "data.path: 'no.txt' is not there"),
    "a dataset": ("data: owner/name", "for a dataset on the Hugging Face hub write hf:owner/name"),
    "no match": ("data: '*.nothing'", "'*.nothing' matches no file: *.nothing; mend the pattern"),
    "no text": ("data: x.yaml", "data: 'x.yaml' is a file of an unknown kind; known: .txt, .md, .py, .jsonl"),
    "no text in glob": ("data: '*.yaml'", "'*.yaml' matches 1 names, but no file of a known kind"),
    "no text in folder": ("data: .", "data: '.' holds no text: .jsonl, .md, .parquet, .txt are read"),
    "odd pattern": ("data: 'x[z-a]*'", "matches no file"),
    "URL": ("data: https://example.org/x", "is a URL, which is not read; download it"),
    "revision of a file": ("data: {path: a.txt, revision: v1}", "revision, which belongs to a dataset"),
    "hub as path": ("data: {path: hf:o/n}", "is a dataset, not a path; write `dataset: o/n`"),
    "loop": ("data: loop", "data: 'loop' cannot be looked at: Too many levels of symbolic links"),
    "broken link": ("data: dangling", "data: 'dangling' is a link to something that is not there"),
    "pipe": ("data: pipe", "data: 'pipe' is neither a file nor a folder"),
    "file as folder": ("data: x.yaml/y", "is not there"),
    "folder as file": ("tokenize: {tokenizer: .}", "'.' is a folder, and a file is needed"),
    "missing tokenizer": ("tokenize: {tokenizer: t.model}", "tokenize.tokenizer: 't.model' is not there"),
    "file as dataset": ("data: {dataset: ./x.yaml}", "is a file, not a folder of a dataset; write it as `path`"),
    "control character": ('data: "a\\nb"', "data: 'a\\nb' holds control characters"),
    "long": ("data: " + "x" * 5000, "File name too long"),
    "no hub name": ("data: 'hf:a b'", "is not a dataset on the hub; write owner/name"),
    "two places": ("data: {path: x.yaml, dataset: o/n}", "data: a mapping needs exactly one of path and dataset"),
    "dataset's key": ("data: {path: x.yaml, config: en}", "has the key config, which belongs to a dataset"),
    "number": ("data: [7]", "data[0]: 7 is not a source of text; write a path, hf:owner/name"),
}


@pytest.fixture
def odd_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("EMPTY_X", "")
    monkeypatch.delenv("UNSET_X", raising=False)


@pytest.mark.usefixtures("odd_files")
@pytest.mark.parametrize(("text", "message"), SECTIONED.values(), ids=SECTIONED)
def test_mistakes_are_named_with_line_key_and_advice(refuse: Refuse, tmp_path: Path, text: str, message: str) -> None:
    (mistake,) = refuse(text)
    assert re.match(r"x\.yaml:\d+: ", mistake)
    assert message in mistake
    assert set(os.listdir(tmp_path)) == {"x.yaml", "loop", "dangling", "pipe"}  # nothing is made or run


HOSTILE_NAMES = [
    "a b", "'a'", '"', "a\nb", "a;b", "$(touch x)", "`touch x`", "-rf", "..", ".", "a/b", "a" * 65, "a" * 300, "🦙", "é",
    "", " ", "a\0", "name\n", "١",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_names_get_the_rule(refuse: Refuse, name: str) -> None:
    (mistake,) = refuse(f"name: {json.dumps(name)}") if name.isascii() else refuse(f"name: {name}")
    assert "is not a name; write 1 to 64 of the letters A-Z a-z, digits, '.', '_', '-'" in mistake
    assert mistake.isprintable()


def test_a_missing_name_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("seed: 1")
    with pytest.raises(ConfigError, match="x.yaml:1: name: is missing; write for example `name: my-model`"):
        load_config(path)


def test_broken_yaml_is_one_mistake(load: Load) -> None:
    with pytest.raises(YamlError, match=r"x\.yaml:2: the key 'seed' is written|x\.yaml:3: the key 'seed'"):
        load("seed: 1\nseed: 2")


def test_all_mistakes_are_said_at_once_in_the_order_of_the_file(refuse: Refuse) -> None:
    text = """\
name: a/b
data: nowhere.txt
pretrain:
  learning_rte: 1e-4
  max_steps: ten
  global_batch_size: 7
  micro_batch_size: 2
model:
  hidden_size: 100
  num_attention_heads: 6
inference: {temperature: -1, top_p: 2}
"""
    mistakes = refuse(text, "seed=x", "evaluate.stride=99999", "nonsense")
    assert [mistake.split(": ")[:2] for mistake in mistakes] == [
        ["x.yaml:1", "name"],
        ["x.yaml:2", "data"],
        ["x.yaml:4", "pretrain.learning_rte"],
        ["x.yaml:5", "pretrain.max_steps"],
        ["x.yaml:6", "pretrain.global_batch_size"],
        ["x.yaml:9", "model.hidden_size"],
        ["x.yaml:11", "inference.temperature"],
        ["x.yaml:11", "inference.top_p"],
        ["override 'seed=x'", "seed"],
        ["override 'evaluate.stride=99999'", "evaluate.stride"],
        ["override 'nonsense'", "nonsense"],
    ]


def test_a_misspelt_key_causes_no_second_mistake_about_its_default(refuse: Refuse) -> None:
    (mistake,) = refuse("model: {hidden_size: 128, num_attention_head: 8}")
    assert "did you mean num_attention_heads?" in mistake


def test_very_many_mistakes_are_counted_and_cut(load: Load) -> None:
    with pytest.raises(ConfigError) as error:
        load("".join(f"key{i}: 1\n" for i in range(1000)))
    lines = str(error.value).splitlines()
    assert len(error.value.mistakes) == 1000
    assert (lines[0].split()[0], len(lines), lines[-1]) == ("1000", 52, "… and 950 more")


# Overrides


def test_overrides_win_over_the_file_and_later_ones_over_earlier(load: Load) -> None:
    config = load(
        "pretrain: {max_steps: 100, warmup_steps: 1}",
        "pretrain.max_steps=200",
        "pretrain.max_steps=1e3",
        "inference.prompts=[a, 'b: c']",
        "inference.top_k=null",
        "tokenize.model_type=unigram",
        "name=other",
    )
    assert (config.name, config.pretrain.max_steps, config.pretrain.warmup_steps) == ("other", 1000, 1)
    assert (config.inference.prompts, config.tokenize.model_type) == (["a", "b: c"], "unigram")


def test_an_override_mends_what_the_file_has_wrong(load: Load) -> None:
    assert load("pretrain: {max_steps: wrong}", "pretrain.max_steps=5000").pretrain.max_steps == 5000
    assert load("pretrain:", "pretrain.max_steps=5000").pretrain.max_steps == 5000
    assert load("data: nowhere", "data={dataset: o/n, config: en}").data == [DataSource(dataset="o/n", config="en")]
    assert load("", "evaluate.benchmarks=[bits_per_byte, python-docs]").evaluate.benchmarks[1].name == "python-docs"
    assert load("", "evaluate.gate=[{above: 2}]").evaluate.gate[0].above == 2
    assert load("data: {dataset: o/n}", "data.config=en").data == [DataSource(dataset="o/n", config="en")]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pretrain.max_steps", "has no `=`; write key.path=value"),
        ("=1", "has no key before the `=`"),
        ("pretrain..max_steps=1", "has no key before the `=`"),
        ("--pretrain.max_steps=1", "is written without dashes"),
        ("pretrain.max_steps=", "has no value"),
        ("pretrain.max_steps=[1", "the list opened by [ in line 1 is broken"),
        ("pretrain.max_steps=3e", "pretrain.max_steps: '3e' is not a whole number"),
        ("pretrain.max_stps=3", "pretrain.max_stps: unknown key; did you mean max_steps?"),
        ("pretrain.max_steps.x=3", "pretrain.max_steps: a mapping is not a whole number"),
        ("nothing.here=3", "nothing: unknown key"),
        ("pretrain={max_steps: 3}", "is a section; set its keys"),
        ("data.path=x", "data is a single value in the file"),
        ("inference.prompts=a # b", "is a comment in YAML; put quotes around the whole value"),
        ("inference.prompts=Hello: you", "a mapping where text is needed; put quotes around text that holds ': '"),
        ("inference.prompts=!x", "the tag '!x' is not allowed"),
        ("inference.prompts={a: 1, a: 2}", "the key 'a' is written twice"),
        ("name=\udcff", "the character U+DCFF is not allowed"),
        ("name=" + "[" * 5000, "lists and mappings in each other"),
    ],
)
def test_bad_overrides_are_named_as_typed(refuse: Refuse, override: str, message: str) -> None:
    (mistake,) = refuse("data: python-stdlib", override)
    assert message in mistake
    assert mistake.startswith(f"override {override[:50]!r}"[:-1])


def test_rules_between_keys_point_at_the_override_that_breaks_them(refuse: Refuse) -> None:
    (mistake,) = refuse("pretrain: {warmup_steps: 50}", "pretrain.max_steps=20")
    assert mistake.startswith("override 'pretrain.max_steps=20': pretrain.max_steps: warmup_steps 50 is more than")


# Runs


def values(field: FieldInfo) -> st.SearchStrategy[Any]:
    """Generate what a field takes."""
    kind = str(field.annotation)
    if "dict" in kind:
        return OPTIONS
    if words := choices_of(field.annotation):
        choice: st.SearchStrategy[Any] = st.sampled_from([*words, True, False] if "bool" in kind else words)
        return st.lists(choice, min_size=1) if "list" in kind else choice
    if "tuple" in kind:
        return st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2)
    if "bool" in kind:
        return st.booleans()
    if "int" in kind or "float" in kind:
        return numbers(field) | st.none() if "None" in kind else numbers(field)
    return LINES | st.none() if "None" in kind else LINES


def numbers(field: FieldInfo) -> st.SearchStrategy[Any]:
    low, high = field.metadata[0], field.metadata[1]
    least, most = getattr(low, "ge", getattr(low, "gt", None)), getattr(high, "le", getattr(high, "lt", None))
    if "int" in str(field.annotation):
        return st.integers(least, most)
    return st.floats(least, most, exclude_min=hasattr(low, "gt"), exclude_max=hasattr(high, "lt"))


def sections(model: type[BaseModel], /, **special: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Generate a section whose fields have any values; `special` are the fields with rules of their own."""
    fields = {key: values(field) for key, field in model.model_fields.items() if key not in special}
    return st.builds(model, **fields, **special)


ODD = "12:00:00|no|1e-4|0123|~|a: b|'|\"|\u2028|# x|- x|<<|{}|[a]|*x|&x|!x|\\|3.10| x |y|\x85|\ufeff|🦙|%x|null".split(
    "|"
)
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12) | st.sampled_from(ODD)
LINES = TEXTS.filter(lambda text: bool(text.strip()) and not has_control_characters(text))
OPTIONS = st.dictionaries(
    st.sampled_from(["partition", "gres", "x-of-a-plugin"]),
    LINES.filter(lambda text: text.lower() not in ("true", "false")),
)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True) | st.sampled_from(["no", "1e3", "007", "y"])
SOURCES = st.builds(DataSource, path=LINES, split=LINES, text_field=LINES) | st.builds(
    DataSource, dataset=LINES, config=st.none() | LINES
)
QUESTIONS = st.just(BenchmarkSource(name=BITS_PER_BYTE, kind="bits_per_byte")) | st.builds(
    BenchmarkSource,
    name=NAMES.filter(lambda name: name != BITS_PER_BYTE),
    kind=st.sampled_from(["multiple_choice", "cloze", "lm_eval"]),
    path=LINES,
)
TIMES = st.integers(1, 10**6).map(str)
CONFIGS = sections(
    Config,
    name=NAMES,
    data=st.lists(SOURCES, min_size=1, max_size=3),
    preflight=sections(PreflightConfig, time=TIMES),
    tokenize=sections(TokenizeConfig, time=TIMES),
    model=sections(ModelConfig),
    pretrain=sections(PretrainConfig, time=TIMES, time_min=TIMES | st.none()),
    evaluate=sections(
        EvaluateConfig,
        time=TIMES,
        benchmarks=st.lists(QUESTIONS, min_size=1, max_size=3, unique_by=lambda benchmark: benchmark.name),
        gate=st.lists(st.builds(GateRule, benchmark=NAMES, below=st.floats(-9, 9)), max_size=2),
    ),
    inference=sections(InferenceConfig, time=TIMES, prompts=st.lists(TEXTS, min_size=1, max_size=4)),
)


@given(CONFIGS)
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_dumped_config_reads_back_equal_in_yaml_1_1_and_1_2(config: Config) -> None:
    text = dump_config(config)
    assert Config.model_validate(parse_document(text, "config.yaml").data) == config
    assert Config.model_validate(yaml.safe_load(text)) == config


def test_a_runs_own_config_is_taken_as_it_is(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    (tmp_path / "$a.txt").touch()
    config = load("data: $$a.txt\npretrain: {time: 1:30}")
    path.write_text(dump_config(config))
    (tmp_path / "$a.txt").unlink()  # the corpus may be gone when the tokens are there
    assert load_run_config(path) == config


def test_a_runs_own_config_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("name: x\nmodel: {hidden_size: 7, num_attention_heads: 2}\nseed: x\n")
    with pytest.raises(ConfigError, match="2 mistakes"):
        load_run_config(path)


@pytest.mark.parametrize(
    ("override", "key", "allowed"),
    [
        ("pretrain.time=2-00", "pretrain.time", True),
        ("evaluate.time=5", "evaluate.time", True),
        ("evaluate.sbatch.partition=cpu", "evaluate.sbatch", True),
        ("pretrain.srun={cpu-bind: cores}", "pretrain.srun", True),
        ("pretrain.nodes=2", "pretrain.nodes", True),
        ("pretrain.segments=9", "pretrain.segments", True),
        ("pretrain.nproc_per_node=2", "pretrain.nproc_per_node", True),
        ("pretrain.micro_batch_size=1", "pretrain.micro_batch_size", True),
        ("threads=3", "threads", True),
        ("runs_dir=elsewhere", "runs_dir", True),
        ("pretrain.max_steps=999999", "pretrain.max_steps", True),
        ("pretrain.max_steps=100", "pretrain.max_steps", False),
        ("pretrain.log_interval=7", "pretrain.log_interval", True),
        ("pretrain.save_interval=7", "pretrain.save_interval", True),
        ("pretrain.keep_last=7", "pretrain.keep_last", True),
        ("pretrain.learning_rate=0.5", "pretrain.learning_rate", False),
        ("model.hidden_size=36", "model.hidden_size", False),
        ("data=hf:o/n", "data", False),
        ("seed=77", "seed", False),
        ("name=y", "name", False),
    ],
)
def test_what_may_change_on_an_existing_run(load: Load, override: str, key: str, allowed: bool) -> None:
    (difference,) = config_differences(load(), load("", override))
    assert (difference.key, difference.allowed) == (key, allowed)
    assert difference.old != difference.new


def test_the_same_config_has_no_differences(load: Load) -> None:
    assert config_differences(load(), load()) == []


# The whole surface: no key, no value and no error type without words


def all_keys() -> Iterator[str]:
    for name, field in Config.model_fields.items():
        section = section_in(field.annotation)
        yield from [name] if section is None else (f"{name}.{key}" for key in section.model_fields)


WILD = [
    "null",
    "true",
    "7",
    "-1",
    "1e300",
    ".nan",
    "-.inf",
    "x",
    "''",
    "[]",
    "{}",
    "[[]]",
    "[{}, 1, x, null]",
    "{x: 1}",
]


@pytest.mark.parametrize("key", list(all_keys()))
def test_every_key_survives_every_kind_of_value(tmp_path: Path, key: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("name: x\n")
    for value in WILD:
        try:
            load_config(path, [f"{key}={value}"], folder=tmp_path)
        except ConfigError as error:
            assert len(error.mistakes) >= 1
            assert not PYDANTIC_WORDS.search(str(error)), str(error)
            assert "not possible here" not in str(error), str(error)  # the words for the unforeseen


ERRORS_OF_NODE: dict[str, set[str]] = {
    "int": {"int_type"},
    "float": {"float_type", "finite_number"},
    "str": {"string_type", "string_unicode"},
    "bool": {"bool_type"},
    "list": {"list_type"},
    "dict": {"dict_type"},
    "tuple": {"tuple_type"},  # its length is looked at before, by a rule
    "literal": {"literal_error"},
    "model": {"model_type"},
    "model-fields": {"missing", "extra_forbidden"},
    "function-before": {"rule"},
    "function-after": {"rule"},
    "union": set(),  # only of pretrain.compile, whose values are looked at before
    **{node: set() for node in ("model-field", "nullable", "default", "definitions", "definition-ref")},
}
BOUNDS = {"ge": "greater_than_equal", "gt": "greater_than", "le": "less_than_equal", "lt": "less_than"}


def possible_errors(schema: Any) -> Iterator[str]:
    """Walk pydantic's core schema; a kind of node that ERRORS_OF_NODE does not know is a KeyError here."""
    if isinstance(schema, list | tuple):
        for item in schema:
            yield from possible_errors(item)
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("type"), str):
        yield from ERRORS_OF_NODE[schema["type"]]
        yield from (BOUNDS[bound] for bound in BOUNDS.keys() & schema.keys())
    for name, inner in schema.items():
        if name not in ("metadata", "serialization", "function"):
            yield from possible_errors(inner)


def test_every_error_of_pydantic_has_words_of_ours() -> None:
    possible = set(possible_errors(Config.__pydantic_core_schema__))
    assert possible == {*WORDS, "extra_forbidden"}


def test_suggestions_name_keys_that_exist() -> None:
    names = {*all_keys(), *Config.model_fields}
    assert set(ELSEWHERE.values()) <= names


# Reference and schema


def test_the_reference_in_docs_is_up_to_date() -> None:
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == config_reference()


def test_every_key_has_a_description_in_schema_and_reference() -> None:
    schema, reference = config_schema(), config_reference()
    json.dumps(schema, allow_nan=False)
    for section in [schema, *schema["$defs"].values()]:
        assert section["additionalProperties"] is False
        for key, value in section["properties"].items():
            assert "$ref" in value or value["description"]
            assert f"`{key}`" in reference


def test_config_is_light_to_import() -> None:
    code = "import sys, pipeline.config.load; print(sorted({'torch', 'numpy', 'datasets'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"
