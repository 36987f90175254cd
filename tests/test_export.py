"""An exported folder is loaded by transformers with no code of ours, and taken back as a starting point."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from own_tokenizer import own_tokenizer

from pipeline.config.load import config_differences, load_config
from pipeline.config.pretrain import ModelConfig
from pipeline.errors import UserError
from pipeline.image.container import data_folders
from pipeline.inference.hugging_face import check_folder
from pipeline.lm import export as exporting
from pipeline.lm.export import export_model
from pipeline.lm.init_from import load_folder
from pipeline.lm.model import Transformer
from pipeline.lm.tokenizer import Tokenizer
from pipeline.run.folder import Run
from pipeline.submit.run_folder import describe

V, CONTEXT = 600, 48
LLAMA = ModelConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    rope_theta=5000.0,
)  # fmt: skip
QWEN = LLAMA.model_copy(update={"qk_norm": True, "tie_word_embeddings": False})
ODD = [
    "", " ", "   ", "\n\n\t x", "</s>", "<unk>", "a</s>b", "<0x41>", "h\u00e9\U0001f600", "\0a\0", "\u2581 x\u2581",
    "e\u0301", "-" * 33, "=" * 333, " " * 77, "\r\n", "\ufeff", "ababababab", "aaaaabaaaaa", "中文字", "١٢٣", "x" * 999,
    "if x:\n        return    y",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return own_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model", V)


def make(config: ModelConfig) -> Transformer:
    model = Transformer(config, V, CONTEXT)
    model.init_weights(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.ndim > 1 else 1.1)  # far from the even probabilities of an untrained one
    return model.eval()


def exported(model: Transformer, tokenizer: Tokenizer, folder: Path, precision: str = "fp32") -> Path:
    folder.mkdir()
    assert export_model(model, tokenizer, folder, precision) == []
    return folder


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(model: Transformer, ids: list[int], count: int) -> list[int]:
    with torch.no_grad():
        for _ in range(count):
            ids = [*ids, int(model(torch.tensor([ids]))[0, -1].argmax())]
    return ids


@pytest.mark.parametrize("config", [LLAMA, QWEN], ids=["llama", "qwen3"])
def test_transformers_computes_the_same(config: ModelConfig, tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make(config)
    theirs = load(exported(model, tokenizer, tmp_path / "model"))
    ids = torch.randint(V, (2, CONTEXT), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids), atol=1e-5, rtol=0)
    prompt = tokenizer.encode("def read(path):\n").tolist()
    settings = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
    generated = theirs.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **settings)
    assert generated[0].tolist() == greedy(model, prompt, 20)


def test_transformers_cuts_every_text_the_same_way(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(exported(make(LLAMA), tokenizer, tmp_path / "model"))
    pieces = [
        "a",
        "b",
        "=",
        "-",
        " ",
        "\n",
        "    ",
        "self",
        "return ",
        "é",
        "😀",
        "</s>",
        "<0x0A>",
        "__",
        "0",
        '"""',
        "\t",
    ]
    chooser = random.Random(0)
    texts = ODD + ["".join(chooser.choices(pieces, k=chooser.randrange(1, 40))) for _ in range(2000)]
    for text in texts:
        ids = tokenizer.encode(text).tolist()
        assert theirs(text)["input_ids"] == ids, text
        assert theirs.decode(ids) == tokenizer.decode(ids)
    assert theirs.eos_token_id == tokenizer.eos_id


def test_a_large_model_is_cut_into_files_and_taken_back(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "SHARD_BYTES", 40_000)
    model, other = make(QWEN), Transformer(QWEN, V, CONTEXT)
    folder = exported(model, tokenizer, tmp_path / "model")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    check_folder(folder, QWEN, V)
    load_folder(folder, other)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_half_the_size(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = make(LLAMA)
    folder = exported(model, tokenizer, tmp_path / "model", "bf16")
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    other = Transformer(LLAMA, V, CONTEXT)
    load_folder(folder, other)
    torch.testing.assert_close(other.model.embed_tokens.weight, model.model.embed_tokens.weight, rtol=2**-8, atol=0)


def test_another_shape_is_one_message_with_every_key(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = exported(make(LLAMA), tokenizer, tmp_path / "model")
    other = LLAMA.model_copy(update={"hidden_size": 64, "num_key_value_heads": None, "rope_theta": 10_000.0})
    with pytest.raises(UserError) as told:
        check_folder(folder, other, V + 1)
    for line in (
        "hidden_size: 64 -> 32",
        "num_key_value_heads: 4 -> 2",
        "rope_theta: 10000.0 -> 5000.0",
        f"vocab_size: {V + 1} -> {V}",
    ):
        assert line in str(told.value)
    with pytest.raises(UserError, match=r"lm_head.weight is missing"):
        load_folder(folder, Transformer(LLAMA.model_copy(update={"tie_word_embeddings": False}), V, CONTEXT))
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"holds neither model.safetensors nor"):
        check_folder(folder, LLAMA, V)


def test_a_config_names_the_folder_to_begin_with(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = exported(make(LLAMA), tokenizer, tmp_path / "model")
    model = "{hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, rope_theta: 5000}"
    own = f"tokenize: {{vocab_size: {V}, tokenizer: {folder}/tokenizer.model}}\n"

    def load_text(text: str) -> Any:
        path = tmp_path / "x.yaml"
        path.write_text(f"name: x\npretrain: {{init_from: {folder}}}\n{text}", encoding="utf-8")
        return load_config(path)

    config = load_text(f"{own}model: {model}\n")
    record = describe(config)["init_from"]
    assert record["path"] == str(folder)
    assert list(record["sha256"]) == ["model.safetensors"]
    assert data_folders(config, Run(tmp_path / "run")) == [folder]
    with pytest.raises(
        UserError,
        match=r"x.yaml:2: pretrain.init_from: .*Set these keys to what it has:\n.*model.hidden_size: 192 -> 32",
    ):
        load_text(own)
    with pytest.raises(UserError, match=r"set tokenize.tokenizer to the model's own"):
        load_text(f"tokenize: {{vocab_size: {V}}}\nmodel: {model}\n")
    other = config.model_copy(update={"pretrain": config.pretrain.model_copy(update={"init_from": None})})
    assert [d.key for d in config_differences(other, config) if not d.allowed] == ["pretrain.init_from"]
