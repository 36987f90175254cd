"""Complete prompts for a person at a terminal: python -m pipeline.stages.generate RUN.

The request comes by standard input, as JSON: {"step", "prompts", "overrides" (of the config), "stream" (true: the text
as it comes, else JSON lines)}.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.config.load import load_config
from pipeline.errors import EXIT_DONE, EXIT_INTERRUPTED, UserError
from pipeline.lm.generation import Generator, make_requests
from pipeline.lm.hardware import start_hardware
from pipeline.lm.serving import open_model
from pipeline.run.folder import Run
from pipeline.visible import visible, visible_json


def generate(run: Run, request: dict[str, Any]) -> None:
    """Print each prompt with what follows it as it comes, or one JSON line for each, in their order."""
    config = load_config(run.config, request["overrides"], resolve=lambda config, folder: (config, []))
    hardware = start_hardware(config, run.record)
    served = open_model(run.checkpoint(request["step"]), run.tokenizer, config, hardware, run.root / "cache")
    requests = make_requests(request["prompts"], served.tokenizer, config.inference, served.context, "--prompt")
    stream = request["stream"]
    if stream:
        _say(request["prompts"][0])
    tell = (lambda number, text: _say(text)) if stream else (lambda number, text: None)
    generator = Generator(served.engine, served.tokenizer, config.inference, served.context, tell)
    ended: dict[int, str] = {}
    printed = 0
    for completion in generator.run(requests):
        ended[completion.number] = visible_json(json.dumps(completion.to_json(), ensure_ascii=False))
        while not stream and printed in ended:
            print(ended[printed], flush=True)
            printed += 1
    speed = generator.speed
    if stream:
        _say("\n")
    rate = speed.tokens / max(speed.seconds, 1e-9)
    print(visible(f"{speed.tokens} tokens, {rate:,.0f} tokens/s, {served.about}"), file=sys.stderr)


def _say(text: str) -> None:
    sys.stdout.write(visible(text))
    sys.stdout.flush()


def main(words: Sequence[str]) -> int:
    try:
        generate(Run(Path(words[0])), json.load(sys.stdin))
        sys.stdout.flush()
    except UserError as error:
        print(visible(f"error: {error}"), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough (| head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
