"""The verb `generate`: everything that can be checked without torch, then the program that does it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.load import load_config
from pipeline.errors import UserError
from pipeline.inference.exporting import step_of
from pipeline.inference.prompts import FIELD, check_prompt, read_prompt_lines, read_prompts
from pipeline.run.folder import Run
from pipeline.submit.aside import run_aside
from pipeline.text_files import as_text

STDIN = "-"
STDIN_LINES = "-.jsonl"  # the same with one JSON object a line, as in a file of that kind


@dataclass(frozen=True)
class Wish:
    """What a person asked for."""

    run: Path
    overrides: list[str]
    prompts: list[str]
    step: int | None
    stream: bool  # text as it comes; else JSON lines

    @classmethod
    def read(
        cls,
        run: Path,
        overrides: Sequence[str],
        prompts: Sequence[str],
        file: Path | None,
        step: int | None,
        json: bool,
    ) -> Wish:
        """Collect the prompts: from the words, a file, or standard input. UserError for those that are none."""
        Run.open(run)  # before standard input is waited for
        found = [check_prompt(prompt, f"--prompt {number}") for number, prompt in enumerate(prompts, 1)]
        if file is not None and str(file) == STDIN_LINES:
            found += read_prompt_lines(as_text(sys.stdin.buffer.read(), "standard input"))
        elif file is not None and str(file) != STDIN:
            found += read_prompts(file)
        elif file is not None or (not found and not sys.stdin.isatty()):
            found.append(check_prompt(as_text(sys.stdin.buffer.read(), "standard input"), "standard input"))
        if not found:
            raise UserError('no prompt; write --prompt "def ", or --file FILE')
        named = [word if "." in word.partition("=")[0] else f"inference.{word}" for word in overrides]
        return cls(run, named, found, step, len(found) == 1 and not json)


def elsewhere(wish: Wish) -> tuple[list[str], bytes]:
    """Return the words of the command line over there, and its standard input: what everybody there may list holds no
    prompt."""
    step = [f"--step={wish.step}"] if wish.step is not None else []
    form = [] if wish.stream else ["--json"]
    if len(wish.prompts) == 1:
        return [*wish.overrides, f"--file={STDIN}", *step, *form], wish.prompts[0].encode()
    lines = "".join(json.dumps({FIELD: prompt}) + "\n" for prompt in wish.prompts)
    return [*wish.overrides, f"--file={STDIN_LINES}", *step, *form], lines.encode()


def generate(wish: Wish) -> int:
    """Complete the prompts; return the exit code."""
    run = Run.open(wish.run)
    config = load_config(run.config, wish.overrides, resolve=lambda config, folder: (config, []))
    request = {
        "step": step_of(run, wish.step),
        "prompts": wish.prompts,
        "overrides": wish.overrides,
        "stream": wish.stream,
    }
    return run_aside(run, config, "generate", [str(run.root)], json.dumps(request))
