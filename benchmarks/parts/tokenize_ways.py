"""The ways to tokenize that are compared, each run in a process and an environment of its own.

`python tokenize_ways.py WAY CORPUS MODEL OUTPUT PROCESSES` prints {"seconds", "tokens"}: from opening the corpus to
ids on disk as uint16, one end of document after each. Imports and loading the model are not counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np

Result = tuple[float, int]  # seconds, tokens
_processor: Any = None


def ours(corpus: Path, model: Path, output: Path, processes: int) -> Result:
    """Run the stage as it is: with its checks of the text, its hashes, and duplicates dropped."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from pipeline.config.schema import Config
    from pipeline.lm.shards import TokenShards
    from pipeline.lm.tokenizer import Tokenizer
    from pipeline.run.folder import Run
    from pipeline.stages.tokenize import tokenize

    section = {"tokenizer": str(model), "vocab_size": Tokenizer(model).vocab_size}
    config = Config.model_validate({"name": "bench", "data": str(corpus), "tokenize": section, "threads": processes})
    run = Run(output)
    started = time.perf_counter()
    tokenize(run, config)
    seconds = time.perf_counter() - started
    return seconds, sum(TokenShards(run.data, split).tokens for split in ("train", "validation"))


def encoder(corpus: Path, model: Path, output: Path, processes: int) -> Result:
    """Run our encoder alone, in one process on texts in memory: what the rest of the stage costs is the difference."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from pipeline.lm.encoder import Encoder
    from pipeline.lm.tokenizer import Tokenizer

    with corpus.open("rb") as file:
        texts = [json.loads(line)["text"].encode() for line in file]
    encode = Encoder(Tokenizer(model)).encode
    started = time.perf_counter()
    tokens = sum(encode(texts[first : first + 1000])[0].size for first in range(0, len(texts), 1000))
    return time.perf_counter() - started, tokens


def _load(model: str) -> None:
    global _processor
    import sentencepiece

    _processor = sentencepiece.SentencePieceProcessor(model_file=model)


def _encode_line(line: str) -> list[int]:
    ids: list[int] = _processor.encode(json.loads(line)["text"])
    return [*ids, 1]


def megatron(corpus: Path, model: Path, output: Path, processes: int) -> Result:
    """Do as Megatron-LM's tools/preprocess_data.py: a pool encodes lines by SentencePiece, the parent writes."""
    with Pool(processes, _load, (str(model),)) as pool, corpus.open(encoding="utf-8") as lines:
        pool.map(len, [()] * processes)  # started
        started = time.perf_counter()
        tokens = 0
        with (output / "shard.bin").open("wb") as file:
            for ids in pool.imap(_encode_line, lines, 32):
                array = np.array(ids, np.uint16)
                tokens += array.size
                file.write(array.tobytes())
        return time.perf_counter() - started, tokens


def datatrove(corpus: Path, model: Path, output: Path, processes: int) -> Result:
    """Run datatrove's reader and tokenizer, a task for each half of the corpus, which lie beside it.

    Its tokenizer is that of the `tokenizers` package: the same vocabulary, written as tokenizer.json.
    """
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    fast = output / "tokenizer.json"
    write_fast_tokenizer(model, fast)
    executor = LocalPipelineExecutor(
        [
            JsonlReader(str(corpus.with_suffix("")), glob_pattern="*.jsonl"),
            DocumentTokenizer(str(output / "tokens"), str(fast), eos_token="</s>", shuffle_documents=False),
        ],
        tasks=processes, workers=processes, logging_dir=str(output / "logs"),
    )  # fmt: skip
    started = time.perf_counter()
    executor.run()
    seconds = time.perf_counter() - started
    return seconds, sum(path.stat().st_size for path in (output / "tokens").glob("*.ds")) // 2


def write_fast_tokenizer(model: Path, path: Path) -> None:
    """Write the vocabulary of a SentencePiece BPE model as the `tokenizers` package reads it."""
    import sentencepiece
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    vocabulary = {processor.id_to_piece(number): number for number in range(processor.vocab_size())}
    merges = []
    for piece, number in vocabulary.items():
        if processor.is_byte(number) or processor.is_control(number) or processor.is_unknown(number):
            continue
        halves = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        merges += [(number, half) for half in halves if half[0] in vocabulary and half[1] in vocabulary]
    merges.sort(key=lambda merge: (merge[0], vocabulary[merge[1][0]], vocabulary[merge[1][1]]))
    bpe = models.BPE(vocabulary, [half for _, half in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.save(str(path))


def datasets(corpus: Path, model: Path, output: Path, processes: int) -> Result:
    """Do as nanoGPT's prepare.py: datasets.map, then a memory map that is filled from it."""
    import datasets

    _load(str(model))
    os.environ["HF_HUB_OFFLINE"] = "1"
    started = time.perf_counter()
    loaded = datasets.load_dataset("json", data_files=str(corpus), split="train", cache_dir=str(output / "cache"))
    encoded = loaded.map(_encode_record, remove_columns=["text"], num_proc=processes)
    tokens = int(np.sum(encoded["length"], dtype=np.uint64))
    shard = np.memmap(output / "shard.bin", dtype=np.uint16, mode="w+", shape=(tokens,))
    at = 0
    for number in range(64):
        batch = encoded.shard(num_shards=64, index=number, contiguous=True).with_format("numpy")
        joined = np.concatenate(batch["ids"][:])
        shard[at : at + len(joined)] = joined
        at += len(joined)
    shard.flush()
    return time.perf_counter() - started, tokens


def _encode_record(record: dict[str, Any]) -> dict[str, Any]:
    ids = [*_processor.encode(record["text"]), 1]
    return {"ids": ids, "length": len(ids)}


WAYS: dict[str, Callable[[Path, Path, Path, int], Result]] = {
    "ours": ours, "encoder": encoder, "megatron": megatron, "datatrove": datatrove, "datasets": datasets,
}  # fmt: skip


if __name__ == "__main__":
    way, corpus, model, output, processes = sys.argv[1:]
    seconds, tokens = WAYS[way](Path(corpus), Path(model), Path(output), int(processes))
    print(json.dumps({"seconds": seconds, "tokens": tokens}))
