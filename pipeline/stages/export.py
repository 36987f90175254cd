"""Write a checkpoint as a Hugging Face folder: python -m pipeline.stages.export RUN STEP PRECISION."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from pipeline.config.load import load_run_config
from pipeline.errors import EXIT_DONE, EXIT_STORAGE, UserError
from pipeline.files import write_json
from pipeline.lm.checkpoint import load_weights
from pipeline.lm.export import export_model
from pipeline.lm.model import Transformer
from pipeline.lm.origin import check_tokenizer
from pipeline.lm.tokenizer import Tokenizer
from pipeline.run.folder import Run
from pipeline.visible import visible


def export(run: Run, step: int, precision: str) -> list[str]:
    """Make RUN/export whole or not at all; a former one is replaced. Return what a person should know."""
    folder = run.export
    config = load_run_config(run.config)
    tokenizer = Tokenizer(run.tokenizer)
    model = Transformer(config.model, config.tokenize.vocab_size, config.pretrain.sequence_length)
    checkpoint = run.checkpoint(step)
    check_tokenizer(checkpoint, load_weights(checkpoint, model), tokenizer.fingerprint)
    fresh, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{kind}") for kind in ("tmp", "old"))
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        notes = export_model(model, tokenizer, fresh, precision)
        write_json(fresh / "source.json", {"run": run.name, "step": step, "precision": precision})
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    return notes


def main(words: list[str]) -> int:
    run, (step, precision) = Run(Path(words[0])), words[1:]
    try:
        for note in export(run, int(step), precision):
            print(visible(f"note: {note}"), file=sys.stderr)
    except UserError as error:
        print(visible(f"error: {error}"), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(visible(f"error: {run.export}: cannot write there: {error.strerror or error}"), file=sys.stderr)
        return EXIT_STORAGE
    print(visible(str(run.export)))
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
