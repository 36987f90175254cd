"""The parts of a report, each from records that were read already; what is not known is left out."""

from __future__ import annotations

import json
import time
from itertools import groupby
from pathlib import Path
from typing import Any

from pipeline.report.charts import Chart, figure, thinned
from pipeline.report.markup import Html, bars, details, join, table, tag
from pipeline.run.attempts import AttemptRecords
from pipeline.run.records import Record, Sample, VerdictRecord, number
from pipeline.status.read import SUCCESS, Status
from pipeline.status.view import beats
from pipeline.units import duration, moment, short, size

LOG_TAIL_BYTES, LOG_TAIL_LINES = 8192, 15
MAX_EVENTS = 300
CURVE_ROWS = 12
NO_PLOTLY = "For curves: pip install plotly, then write the report again."


def header(status: Status, record: Record, index: Record, metrics: list[Record], seconds: float) -> Html:
    """Return name, state and one sentence that says what came out."""
    title = tag("div", tag("h1", status.run.name), _state(status.state), class_="title")
    eyebrow = tag("p", "Training report", class_="eyebrow")
    lead = _lead(status, record, index, metrics, seconds)
    return tag("header", eyebrow, title, *([tag("p", lead, class_="lead")] if lead else []))


def _lead(status: Status, record: Record, index: Record, metrics: list[Record], seconds: float) -> str:
    if not metrics:
        return ""
    parameters, tokens = number(record.get("parameters")), number(metrics[-1].get("tokens"))
    text_bytes = number(_split(index, "train").get("bytes"))
    model = f"A model of {short(parameters)} parameters" if parameters else "A model"
    trained = f"trained for {status.step:,} steps" if status.step is not None else "trained"
    trained += f" on {short(tokens)} tokens" if tokens else ""
    trained += f" from {size(text_bytes)} of text" if text_bytes else ""
    trained += f" in {_spoken(seconds)}" if seconds else ""
    if (comparison := beats(status)) is None:
        return f"{model}, {trained}."
    score, name, other = comparison
    share = 1 - score / other
    against = f"{abs(share):.1%} {'fewer' if share >= 0 else 'more'} than {name}"
    return f"{model}, {trained}, needs {score:.3f} bits per byte of text it has not seen: {against}."


def _spoken(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"


def alert(status: Status, attempts: list[AttemptRecords]) -> Html:
    """Return why a Run has not come to its end, with the end of the log that tells more."""
    if status.state not in ("failed", "stopped"):
        return Html("")
    said = [tag("p", tag("b", f"The Run has {'failed' if status.state == 'failed' else 'stopped'}."))]
    if status.reason:
        said.append(tag("p", status.reason, class_="reason"))
    bad = [(one.name, one.verdict) for one in attempts if one.verdict and one.verdict.verdict not in SUCCESS]
    if status.state == "failed" and bad:
        name, last = bad[-1]
        step = f" at step {last.step:,}" if last.step is not None else ""
        words = (f"Verdict of attempt {name}: ", tag("b", last.verdict), f"{step}.")
        said.append(tag("p", *words, class_="muted"))
    for job in status.jobs:
        if job.state == "failed" and job.log and (lines := _log_tail(status.run.root / job.log)):
            said.append(details(f"The end of {job.log}", tag("pre", lines), opened=True))
    return tag("div", *said, class_=f"alert {status.state}", role="alert")


def _log_tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-LOG_TAIL_LINES:])


def tiles(status: Status, metrics: list[Record], seconds: float) -> Html:
    """Return the numbers that one looks for first."""
    found: list[tuple[str, str, str]] = []
    if comparison := beats(status):
        score, name, other = comparison
        found.append((f"{score:.3f}", "bits per byte, validation", "best"))
        found.append((f"{score / other - 1:+.1%}".replace("-", "\N{MINUS SIGN}"), f"bits against {name}", ""))
    elif scored := [score for score in status.scores if score.benchmark == "bits_per_byte"]:
        found.append((f"{scored[-1].score:.3f}", "bits per byte, validation", "best"))
    if status.step is not None:
        found.append((f"{status.step:,}", f"of {status.max_steps:,} steps" if status.max_steps else "steps", ""))
    if status.loss is not None:
        found.append((f"{status.loss:.3f}", "last training loss, nats/token", ""))
    if metrics and (tokens := number(metrics[-1].get("tokens"))):
        found.append((short(tokens), "tokens trained on", ""))
    if status.tokens_per_s:
        found.append((short(status.tokens_per_s), "tokens/s", ""))
    if seconds:
        found.append((duration(seconds), "time in steps", ""))
    if status.goodput is not None:
        found.append((f"{status.goodput:.0%}", "goodput: steps / wall time", ""))
    shown = [
        tag("div", tag("b", value), tag("span", label), class_=f"tile {kind}".strip()) for value, label, kind in found
    ]
    return tag("div", *shown, class_="tiles") if shown else Html("")


def training(metrics: list[Record], charts: list[Chart]) -> Html:
    """Return the curves, and a few of their points as a table."""
    rows = [metrics[at] for at in thinned(len(metrics), CURVE_ROWS)]
    titles = ("step", "tokens", "loss", "learning rate", "gradient norm", "tokens/s")
    cells = [
        (
            f"{row['step']:,}",
            short(number(row.get("tokens"))),
            *[_digits(row.get(key)) for key in ("loss", "lr", "grad_norm")],
            short(number(row.get("tokens_per_s"))),
        )
        for row in rows
    ]
    numbers = details("The curves in numbers", table(titles, cells, numbers=range(6)), opened=not charts)
    if not charts:
        return join([tag("p", NO_PLOTLY, class_="note"), numbers])
    switches = [_switch("smooth", "running mean", on=True), _switch("log-steps", "logarithmic steps", on=False)]
    drawn = tag("div", *[figure(chart) for chart in charts], class_="grid")
    script = tag("noscript", tag("p", "The curves are drawn by a script, which is switched off.", class_="note"))
    return join([tag("div", *switches, class_="switch"), script, drawn, numbers])


def time_split(status: Status) -> Html:
    """Return what the wall time of training went into, as bars and in numbers."""
    split = status.time
    if split is None or split.wall <= 0:
        return Html("")
    names = {"startup": "start-up", "repeated": "repeated steps"}
    rows = [
        (names.get(kind, kind), seconds, f"{seconds / split.wall:.1%}", "model" if kind == "step" else "")
        for kind, seconds in split.to_json().items()
    ]
    note = f"What the {duration(split.wall)} from the first start of pretrain on went into; steps are the goodput."
    return join([tag("p", note, class_="note"), bars(rows)])


def _digits(value: Any) -> str:
    return f"{found:.4g}" if (found := number(value)) is not None else ""


def _switch(id_: str, label: str, on: bool) -> Html:
    checked = {"checked": ""} if on else {}
    return tag("label", tag("input", type="checkbox", id=id_, **checked), label)


def samples(found: list[Sample], record: Record) -> Html:
    """Return the completions of the newest checkpoint with how fast they were made, and those before it folded."""
    steps = [(step, list(group)) for step, group in groupby(found, key=lambda sample: sample.step)]
    if not steps:
        return Html("")
    (step, newest), earlier = steps[-1], steps[:-1]
    note = tag("p", f"What the model of step {step:,} makes of a prompt. The prompt is in colour.", class_="note")
    folded = [details(f"Step {step:,}", *map(_sample, group)) for step, group in reversed(earlier)]
    return join([note, _speed(record), *map(_sample, newest), *folded])


def _speed(record: Record) -> Html:
    """Return what was measured while the newest samples were made, and the targets that were reached or missed."""
    if number(record.get("tokens_per_s")) is None:
        return Html("")
    names = {"tokens_per_s": "tokens/s, all prompts together", "first_token_p50": "s to the first token, median"}
    names |= {
        "first_token_p95": "s to the first token, 95 %",
        "token_p50": "s a token, median",
        "token_p95": "s a token, 95 %",
    }
    targets = {str(row.get("target")): row for row in record.get("targets") or [] if isinstance(row, dict)}
    rows = []
    for key, name in names.items():
        target = targets.get(key, {})
        said = {True: "passed", False: "failed"}.get(target.get("reached"), "not measured" if target else "")  # type: ignore[arg-type]
        rows.append((name, _digits(record.get(key)), _digits(target.get("wanted")), said))
    note = f"Measured on the last attempt's {_count(record.get('prompts'))} prompts with {record.get('engine')}."
    return join([table(("speed", "measured", "target", ""), rows, numbers=(1, 2)), tag("p", note, class_="note")])


def _sample(sample: Sample) -> Html:
    ends = {"stop": "ended by the model", "length": "cut at the length asked for"}
    count = f"{sample.tokens:,} tokens" if sample.tokens is not None else ""
    told = ", ".join(part for part in (count, ends.get(sample.finish_reason, sample.finish_reason)) if part)
    text = tag("pre", tag("span", sample.prompt, class_="prompt"), sample.completion, class_="sample")
    return join([tag("div", tag("span", told), class_="sample-head note"), text])


def data(index: Record) -> Html:
    """Return what was read and how it was cut into tokens."""
    splits = {name: split for name, split in _mapping(index.get("splits")).items() if isinstance(split, dict)}
    if not splits:
        return Html("")
    keys = list(
        dict.fromkeys(key for split in splits.values() for key, value in split.items() if number(value) is not None)
    )
    rows = [(name, *[_count(split.get(key)) for key in keys]) for name, split in splits.items()]
    titles = ("split", *[key.replace("_", " ") for key in keys])
    told = {**_flat("tokenizer", index.get("tokenizer")), **_flat("read", index.get("read"))}
    more = [details("Tokenizer and reading", _keys(told))] if told else []
    return join([table(titles, rows, numbers=range(1, len(titles))), *more])


def jobs(status: Status, attempts: list[AttemptRecords], events: list[Record]) -> Html:
    """Return the Jobs, how each attempt ended, and the events."""
    now, content = time.time(), []
    if status.jobs:
        rows = [
            (
                job.name,
                str(job.segment),
                job.job_id,
                "" if job.attempt is None else str(job.attempt),
                _state(job.state),
                moment(job.started),
                duration(job.seconds(now)),
                job.reason,
            )
            for job in status.jobs
        ]
        titles = ("stage", "segment", "job", "attempt", "state", "started", "duration", "reason")
        content.append(table(titles, rows, numbers=(1, 2, 3, 6)))
    if listed := [_verdict_row(one.name, one.verdict) for one in attempts if one.verdict]:
        heads = ("attempt", "stage", "verdict", "step", "time", "host", "reason")
        content.append(details(f"Attempts ({len(listed)})", table(heads, listed, numbers=(3,))))
    if events:
        left_out = f", the last {MAX_EVENTS}" if len(events) > MAX_EVENTS else ""
        summary = f"Events ({len(events):,}{left_out})"
        rows_ = [_event_row(event) for event in events[-MAX_EVENTS:]]
        content.append(
            details(summary, table(("time", "event", "stage", "attempt", "step", "more"), rows_, numbers=(4,)))
        )
    return join(content)


def _verdict_row(name: str, verdict: VerdictRecord) -> tuple[str, ...]:
    step = _count(verdict.step)
    return name, verdict.stage or "", verdict.verdict, step, moment(verdict.time or None), verdict.host, verdict.reason


def _event_row(event: Record) -> tuple[str, ...]:
    shown = ("time", "event", "stage", "job_id", "attempt", "step", "host")
    more = ", ".join(f"{key} {value}" for key, value in event.items() if key not in shown)
    attempt = f"{event['job_id']}.{event.get('attempt', 0)}" if "job_id" in event else ""
    said = (str(event.get("event", "")), str(event.get("stage") or ""), attempt)
    return moment(number(event.get("time"))), *said, _count(event.get("step")), more


def config(text: str) -> Html:
    """Return the Config as it lies in the Run."""
    return details("config.yaml", tag("pre", text), opened=text.count("\n") < 80) if text else Html("")


def versions(record: Record) -> Html:
    """Return all of run.json: what a twin of this Run would need."""
    return _keys(_flat("", record)) if record else Html("")


def _keys(values: dict[str, str]) -> Html:
    return table(("", ""), values.items(), class_="keys")


def _flat(prefix: str, value: Any) -> dict[str, str]:
    """Name the leaves of nested records by their paths: {"a": {"b": 1}} becomes {"a b": "1"}."""
    if not isinstance(value, dict):
        text = value if isinstance(value, str) else _count(value) or json.dumps(value)
        return {prefix: "unknown" if value is None else text}
    flat: dict[str, str] = {}
    for key, inner in value.items():
        flat |= _flat(f"{prefix} {key.replace('_', ' ')}".strip(), inner)
    return flat


def _count(value: Any) -> str:
    found = number(value)
    return "" if found is None else f"{found:,}" if isinstance(found, int) else f"{found:,.4g}"


def _mapping(value: Any) -> Record:
    return value if isinstance(value, dict) else {}


def _split(index: Record, name: str) -> Record:
    return _mapping(_mapping(index.get("splits")).get(name))


def _state(state: str) -> Html:
    return tag("span", state, class_=f"state {state}")
