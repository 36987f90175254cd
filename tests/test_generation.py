"""A prompt's text depends on nothing but the prompt, the settings and the weights."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from own_tokenizer import own_tokenizer

from pipeline.config.inference import InferenceConfig
from pipeline.config.pretrain import ModelConfig
from pipeline.config.schema import Config
from pipeline.errors import UserError
from pipeline.files import append_line, read_json, read_lines, write_json
from pipeline.inference.prompts import read_prompts
from pipeline.inference.samples import compare, measured
from pipeline.lm.engine import Engine, Part, TorchEngine
from pipeline.lm.generation import Completion, Generator, make_requests
from pipeline.lm.model import Transformer
from pipeline.lm.native import NativeEngine, build
from pipeline.lm.optim import build_optimizers
from pipeline.lm.sampling import TextStream, choose
from pipeline.lm.saver import Saver
from pipeline.lm.tokenizer import Tokenizer
from pipeline.run.folder import Run
from pipeline.stages.early import Stopped
from pipeline.stages.inference import inference
from pipeline.stages.main import Attempt

V, CONTEXT = 500, 64
SIZES = [  # heads that share keys; a width that is no multiple of a vector's lanes
    ModelConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        qk_norm=True, tie_word_embeddings=False,
    ),
    ModelConfig(hidden_size=40, intermediate_size=50, num_hidden_layers=2, num_attention_heads=5),
]  # fmt: skip
PROMPTS = [
    "def ",
    "import os\nimport sys\n",
    "x",
    "class Stack:\n    def push(self, item):\n",
    "def ",
    "\u00e9\U0001f600 \0",
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Let threads of so small a model not wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return own_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model", V)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return native.c compiled; None on a machine without a C compiler, where torch alone computes."""
    found = build(tmp_path_factory.mktemp("native"))
    assert found is not None or not any(map(shutil.which, ("cc", "gcc", "clang")))
    return found


def make(size: ModelConfig) -> Transformer:
    model = Transformer(size, V, CONTEXT)
    model.init_weights(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.ndim > 1 else 1.2)  # far from the even probabilities of an untrained one
    return model


def engines(library: Any, model: Transformer, slots: int, dtype: torch.dtype = torch.float32) -> list[Engine]:
    native = [NativeEngine(library, model, slots, dtype, 1)] if library else []
    return [TorchEngine(copy.deepcopy(model), slots, "cpu", dtype), *native]


def settings(**changes: Any) -> InferenceConfig:
    return InferenceConfig(**{"max_new_tokens": 12, "temperature": 1.0, "seed": 1, **changes})


def texts(
    engine: Engine, tokenizer: Tokenizer, config: InferenceConfig, prompts: list[str] = PROMPTS, **more: Any
) -> list[Completion]:
    requests = make_requests(prompts, tokenizer, config, CONTEXT, "prompts")
    found = Generator(engine, tokenizer, config, CONTEXT, **more).run(requests)
    return sorted(found, key=lambda completion: completion.number)


@pytest.mark.parametrize("size", SIZES, ids=["grouped", "odd width"])
def test_engines_compute_what_the_model_computes(library: Any, size: ModelConfig) -> None:
    model = make(size)
    ids = torch.randint(V, (60,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids[None])[0]
    for engine in engines(library, model, 3):
        first = engine.forward([Part(1, 0, ids[:20].tolist()), Part(0, 0, ids[:50].tolist())])
        torch.testing.assert_close(first, expected[[19, 49]], atol=2e-5, rtol=0)
        for at in range(20, 30):
            last = engine.forward([Part(1, at, [int(ids[at])])])
        torch.testing.assert_close(last[0], expected[29], atol=2e-5, rtol=0)
        later = engine.forward([Part(1, 30, ids[30:60].tolist())])  # several at once behind those that are there
        torch.testing.assert_close(later[0], expected[59], atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_text_is_the_same_at_any_batch_size_and_order(library: Any, tokenizer: Tokenizer, dtype: Any) -> None:
    model, backwards = make(SIZES[0]), list(reversed(PROMPTS[:4] + PROMPTS[5:]))
    for which in range(2 if library else 1):
        runs = [
            texts(engines(library, model, size, dtype)[which], tokenizer, settings(batch_size=size, max_new_tokens=6))
            for size in (1, 2, 32)
        ]
        first = [completion.text for completion in runs[0]]
        assert all([completion.text for completion in run] == first for run in runs)
        assert len(set(first)) == len(first)  # equal prompts too have a seed each
        engine = engines(library, model, 3, dtype)[which]
        again = {
            c.prompt: c.text for c in texts(engine, tokenizer, settings(batch_size=3, max_new_tokens=6), backwards)
        }
        assert again == {c.prompt: c.text for c in runs[0] if c.number != 4}


def test_logits_are_the_same_to_the_bit_whatever_is_computed_beside_them(library: Any) -> None:
    ids = torch.randint(V, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    for engine in engines(library, make(SIZES[1]), 20):
        alone = engine.forward([Part(3, 0, ids[:30])])[0]
        for others in (1, 7, 19):
            parts = [Part(n if n < 3 else n + 1, 0, ids[: n + 2]) for n in range(others)]
            assert torch.equal(engine.forward([*parts, Part(3, 0, ids[:30])])[-1], alone)
        step = engine.forward([Part(3, 30, ids[30:31])])[0]
        assert torch.equal(engine.forward([Part(5, 7, [4]), Part(3, 30, ids[30:31]), Part(9, 2, [7])])[1], step)
    threads = [NativeEngine(library, make(SIZES[1]), 2, torch.float32, n) for n in ((1, 2, 3) if library else ())]
    several = [engine.forward([Part(0, 0, ids[:30]), Part(1, 0, ids[:9])]) for engine in threads]
    assert all(torch.equal(several[0], other) for other in several)


def test_a_text_never_runs_past_the_context(library: Any, tokenizer: Tokenizer) -> None:
    engine, wanted = engines(library, make(SIZES[0]), 4)[0], settings(max_new_tokens=10)

    def prompt(length: int) -> str:
        text = "x=" * 200
        ids = tokenizer.encode(text)[:length]
        assert len(tokenizer.encode(tokenizer.decode(ids))) == length
        return tokenizer.decode(ids)

    cut, full = texts(engine, tokenizer, wanted, [prompt(CONTEXT - 4), prompt(CONTEXT)])
    assert (cut.tokens, cut.finish_reason) == (4, "length")
    assert (full.tokens, full.text, full.finish_reason) == (0, "", "length")
    with pytest.raises(UserError, match=rf"prompt 2 has {CONTEXT + 1} tokens, but the model's context holds {CONTEXT}"):
        texts(engine, tokenizer, wanted, ["x", prompt(CONTEXT + 1)])
    (long,) = texts(engine, tokenizer, settings(max_new_tokens=10, long_prompts="cut"), ["x=" * 200_000])
    assert long.tokens == 10
    assert long.prompt == "x=" * 200_000


def test_greedy_is_what_the_whole_model_would_choose(library: Any, tokenizer: Tokenizer) -> None:
    model = make(SIZES[0])
    ids = tokenizer.encode(PROMPTS[1]).tolist()
    for _ in range(12):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    for engine in engines(library, model, 2):
        (found,) = texts(engine, tokenizer, settings(temperature=0.0), [PROMPTS[1]])
        assert PROMPTS[1] + found.text == tokenizer.decode(ids)


def test_streamed_parts_are_whole_characters_and_make_up_the_text(tokenizer: Tokenizer) -> None:
    single = [n for n in range(V) if len(tokenizer.bytes_of(n)) == 1 and n < 258]
    emoji = tokenizer.encode("h\u00e9\U0001f600").tolist()
    stream = TextStream(tokenizer)
    assert [part for part in map(stream.push, emoji) if part] == ["h", "\u00e9", "\U0001f600"]
    chooser = random.Random(0)
    for _ in range(500):
        ids = [chooser.choice([*single, *emoji, chooser.randrange(2, V)]) for _ in range(chooser.randrange(1, 12))]
        stream = TextStream(tokenizer)
        assert "".join([*map(stream.push, ids), stream.finish()]) == tokenizer.decode(ids)
    stream = TextStream(tokenizer)
    assert [*map(stream.push, emoji[:-1])][-1] == ""
    assert stream.finish() == "\ufffd" * 3


def test_a_text_ends_at_a_stop_text_wherever_tokens_begin(tokenizer: Tokenizer) -> None:
    def streamed(text: str, *stops: str) -> tuple[str, bool]:
        stream = TextStream(tokenizer, stops)
        parts = []
        for token in tokenizer.encode(text).tolist():
            parts.append(stream.push(token))
            if stream.stopped:
                break
        parts.append(stream.finish())
        assert "".join(parts) == stream.text
        return stream.text, stream.stopped

    assert streamed("return x\n\ndef f", "\n\n", "f") == ("return x", True)
    assert streamed("aab", "ab") == ("a", True)
    assert streamed("return x\n", "\n\n") == ("return x\n", False)  # held back, then given


def test_sampling_keeps_to_its_limits() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.9, -1.0], [5.0, 0.0, 0.0, 0.0]])

    def drawn(**changes: Any) -> set[tuple[int, ...]]:
        chosen = (
            choose(
                logits, settings(**changes), [torch.Generator().manual_seed(s), torch.Generator().manual_seed(s + 1)]
            )
            for s in range(40)
        )
        return set(map(tuple, chosen))

    assert drawn(temperature=0.0) == {(1, 0)}
    assert drawn(temperature=5e-324) == {(1, 0)}
    assert {first for first, _ in drawn(temperature=100.0)} == {0, 1, 2, 3}
    assert {first for first, _ in drawn(top_k=2)} == {1, 2}
    assert drawn(top_p=1e-9) == {(1, 0)}
    assert {first for first, _ in drawn(min_p=0.5)} == {1, 2}
    assert drawn(top_k=V, top_p=1.0, min_p=1e-9)  # more than there are: all
    with pytest.raises(UserError, match="not finite"):
        choose(torch.tensor([[0.0, float("nan")]]), settings(), [torch.Generator()])


BAD_SETTINGS = {
    "temperature": [-1, float("nan")], "top_k": [0], "top_p": [0, 1.1], "min_p": [0, 1.1], "max_new_tokens": [0],
    "seed": [2**64], "stop": [[""]], "batch_size": [0],
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD_SETTINGS.items() for value in values])
def test_settings_out_of_range_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        InferenceConfig.model_validate({key: value})


def test_prompts_are_read_as_they_are_or_refused_with_their_line(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "a\\n b\\u0000"}\n\n{"prompt": "   ", "id": 7}\n', encoding="utf-8")
    assert read_prompts(lines) == ["a\n b\0", "   "]
    lines.write_text('{"prompt": "a\u2028b\u0085"}', encoding="utf-8")
    assert read_prompts(lines) == ["a\u2028b\u0085"]
    plain = tmp_path / "prompts.txt"
    plain.write_bytes(b"  def \r\n\n\xc3\xa9\n")
    assert read_prompts(plain) == ["  def ", "\u00e9"]
    for content, told in {
        b'{"prompt": ""}': r"jsonl:1: an empty prompt",
        b'{"prompt": "a"}\n{"text": "b"}': r"jsonl:2: has no text in the field prompt",
        b'{"prompt": "a"}\n[': r"jsonl:2: not JSON",
        b'{"prompt": "\\ud800"}': r"jsonl:1: not valid Unicode",
        b'{"prompt": "a"}\n"\xff"': r"jsonl:2: byte 17 \(0xff\) is not UTF-8",
        b"\n": "holds no prompt",
    }.items():
        lines.write_bytes(content)
        with pytest.raises(UserError, match=told):
            read_prompts(lines)


def test_a_text_with_other_ends_of_lines_is_one_line_of_a_file(tmp_path: Path) -> None:
    path, record = tmp_path / "lines.jsonl", {"completion": "a\u2028b\u0085c\u2029\r\n\f"}
    append_line(path, record)
    append_line(path, record)
    assert read_lines(path) == [record, record]


def test_a_stopped_stage_keeps_what_it_has_finished(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, attempt = Run(tmp_path / "run"), Attempt("inference", "4", 0, 0)
    keys: dict[str, Any] = {"prompts": PROMPTS, "batch_size": 2, "max_new_tokens": 6, "target_tokens_per_s": 1e-3}
    config = Config.model_validate(
        {
            "name": "x", "threads": 1, "tokenize": {"vocab_size": V}, "inference": keys,
            "model": SIZES[0].model_dump(), "pretrain": {"sequence_length": CONTEXT},
        }
    )  # fmt: skip
    run.data.mkdir(parents=True)
    run.tokenizer.write_bytes(tokenizer.path.read_bytes())
    model = make(SIZES[0])
    with Saver(run.checkpoints, {"tokenizer": tokenizer.fingerprint}) as saver:
        optimizers = build_optimizers(model, config.pretrain)
        model(torch.arange(9)[None], torch.arange(9)[None]).backward()
        for optimizer in optimizers:
            optimizer.step()
        saver.save(3, model, optimizers, {"step": 3})
    write_json(run.owner_of("inference"), {})
    monkeypatch.setattr("pipeline.stages.inference.fence", lambda run, attempt: None)
    assert inference(run, config, attempt) == 3
    whole = [line["completion"] for line in read_lines(run.samples(3))]
    assert read_json(run.samples_record(3))["targets"][0]["reached"] is True
    run.samples(3).unlink()

    polled = 0

    def stop_after(run: Run, attempt: Attempt) -> None:
        nonlocal polled
        polled += 1
        if polled == 9:
            raise Stopped("time is up")

    monkeypatch.setattr("pipeline.stages.inference.poll", stop_after)
    with pytest.raises(Stopped):
        inference(run, config, attempt)
    kept = read_lines(run.samples_begun(3))[1:]
    assert 0 < len(kept) < len(PROMPTS)
    append_line(run.samples_begun(3), {"number": kept[0]["number"]} | kept[0] | {"completion": "kept, not made again"})
    assert inference(run, config, attempt) == 3
    lines = read_lines(run.samples(3))
    assert [line["prompt"] for line in lines] == PROMPTS
    assert [line["completion"] for line in lines] == [
        "kept, not made again" if number == kept[0]["number"] else text for number, text in enumerate(whole)
    ]
    assert not run.samples_begun(3).exists()


def test_targets_are_reached_missed_or_not_measured() -> None:
    figures = measured(100, 2.0, [0.1, 0.2, 0.9], [])
    assert (figures["tokens_per_s"], figures["first_token_p50"], figures["first_token_p95"]) == (50.0, 0.2, 0.9)
    wanted = settings(target_tokens_per_s=60.0, target_first_token_p50=0.3, target_first_token_p95=0.3)
    assert [result["reached"] for result in compare(figures, wanted)] == [False, True, False]
    assert [result["reached"] for result in compare(measured(0, 0.0, [], []), wanted)] == [None, None, None]
