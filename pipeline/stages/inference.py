"""Let the newest checkpoint of a Run complete its prompts, into samples/."""

from __future__ import annotations

from pipeline.stages import early  # noqa: F401 - first: signals are taken while torch is imported

# isort: split
import json
import sys
from typing import Any

from pipeline.config.schema import Config
from pipeline.errors import NotReadyError
from pipeline.files import append_line, read_lines, write_json, write_text
from pipeline.inference.samples import compare, measured, prompts_of, settings_digest
from pipeline.lm.generation import Generator, make_requests
from pipeline.lm.hardware import start_hardware
from pipeline.lm.serving import Served, open_model
from pipeline.run.folder import Run
from pipeline.stages.main import Attempt, fence, poll, run_stage


def inference(run: Run, config: Config, attempt: Attempt) -> int:
    """Write samples/step-N.jsonl, one line per prompt in their order, and what was measured; return the step.

    Each text is kept as soon as it ends, so a killed attempt costs those under way: the next goes on with the others.
    """
    steps = run.checkpoint_steps()
    if not steps:
        raise NotReadyError(f"{run.checkpoints}: no checkpoint to sample from yet; pretrain writes the first one")
    step = steps[-1]
    hardware = start_hardware(config, run.record)
    served = open_model(run.checkpoint(step), run.tokenizer, config, hardware, run.root / "cache")
    settings = {"settings": settings_digest(config.inference), "checkpoint": served.checkpoint, "weights": served.dtype}
    finished = _begin(run, step, settings)
    prompts = prompts_of(config.inference)
    where = config.inference.prompts_file or "inference.prompts"
    requests = make_requests(prompts, served.tokenizer, config.inference, served.context, where)
    generator = Generator(
        served.engine, served.tokenizer, config.inference, served.context, poll=lambda: poll(run, attempt)
    )
    for completion in generator.run([request for request in requests if request.number not in finished]):
        finished[completion.number] = record = {"number": completion.number} | completion.to_json()
        append_line(run.samples_begun(step), record, lambda: fence(run, attempt))
        print(f"{completion.tokens} tokens in {completion.seconds:.1f} s after {completion.prompt!r}")
    lines = [{key: value for key, value in finished[request.number].items() if key != "number"} for request in requests]
    fence(run, attempt)
    _write_record(run, step, config, settings, served, generator)
    write_text(run.samples(step), "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    run.samples_begun(step).unlink(missing_ok=True)
    return step


def _begin(run: Run, step: int, settings: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return what an earlier attempt has finished with these very settings; with others it is made anew."""
    path = run.samples_begun(step)
    lines = read_lines(path)
    if lines and lines[0] == settings:
        return {line["number"]: line for line in lines[1:]}
    write_text(path, json.dumps(settings) + "\n")
    return {}


def _write_record(
    run: Run, step: int, config: Config, settings: dict[str, Any], served: Served, generator: Generator
) -> None:
    """Tell what the samples were made with, how fast, and which targets were reached."""
    speed = generator.speed
    figures = measured(speed.tokens, speed.seconds, speed.first_token, speed.between)
    targets = compare(figures, config.inference)
    about = {"engine": served.about, "batch_size": config.inference.batch_size, "prompts": len(speed.first_token)}
    write_json(run.samples_record(step), settings | about | figures | {"targets": targets})
    for target in targets:
        said = {True: "reached", False: "missed", None: "not measured"}[target["reached"]]
        print(f"target {target['target']}: {said}, {target['measured']} measured, {target['wanted']} wanted")


if __name__ == "__main__":
    sys.exit(run_stage("inference", inference))
