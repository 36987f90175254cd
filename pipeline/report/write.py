"""Write report.html: one file that shows a Run, on a phone or a desk, without a network."""

from __future__ import annotations

import time
from pathlib import Path
from string import Template

from pipeline.errors import StorageError
from pipeline.files import write_text
from pipeline.report import parts
from pipeline.report.charts import Chart, plotly_source, score_charts, scripts, training_charts
from pipeline.report.data import text_charts
from pipeline.report.markup import Html, join, tag
from pipeline.report.scores import scores
from pipeline.run.attempts import all_attempts
from pipeline.run.folder import Run
from pipeline.run.records import (
    Record,
    Sample,
    read_metrics,
    read_record,
    read_records,
    read_samples,
    seconds_in_steps,
    text_of,
)
from pipeline.status.read import read_status
from pipeline.units import moment

Section = tuple[str, Html]  # title, content; a section with no content is left out


def write_report(run: Run) -> Path:
    """Write report.html of a Run in any state and return its path.

    Without plotly the curves are left out and the report says how to get them. Raises StorageError if the folder
    cannot be written.
    """
    try:
        write_text(run.report, render(run))
    except OSError as error:
        raise StorageError(f"{run.report}: cannot write the report: {error.strerror or error}") from error
    return run.report


def render(run: Run) -> str:
    """Return the report as HTML."""
    status, record, metrics = read_status(run), read_record(run.record), read_metrics(run)
    index, attempts = read_record(run.index), all_attempts(run)
    curves, over_steps = training_charts(metrics), score_charts(status.scores, status.compressors)
    drawn, samples = plotly_source() is not None, read_samples(run)
    sections: list[Section] = [
        ("Scores", scores(status, over_steps if drawn else [])),
        ("Training", parts.training(metrics, curves if drawn else []) if metrics else Html("")),
        ("Time", parts.time_split(status)),
        ("Samples", parts.samples(samples, _samples_record(run, samples))),
        ("Data", join([parts.data(index), text_charts(index)])),
        ("Jobs", parts.jobs(status, attempts, read_records(run.events))),
        ("Config", parts.config(text_of(run.config))),
        ("Versions", parts.versions(record)),
    ]
    present = [(title, content) for title, content in sections if content]
    seconds = seconds_in_steps(metrics)
    body = [
        parts.header(status, record, index, metrics, seconds),
        tag("nav", *[tag("a", title, href=f"#{title.lower()}") for title, _ in present], aria_label="Sections"),
        parts.alert(status, attempts),
        parts.tiles(status, metrics, seconds),
        *[tag("section", tag("h2", title), content, id=title.lower()) for title, content in present],
        tag("footer", f"Written {moment(time.time())} from {run.root}. Source of the state: {status.source}."),
    ]
    return _page(run, join(body), [*curves, *over_steps])


def _samples_record(run: Run, samples: list[Sample]) -> Record:
    return read_record(run.samples_record(samples[-1].step)) if samples else {}


def _page(run: Run, body: Html, charts: list[Chart]) -> str:
    here = Path(__file__)
    template = Template(here.with_name("report.html").read_text(encoding="utf-8"))
    style = here.with_name("report.css").read_text(encoding="utf-8")
    return template.substitute(
        title=join([run.name, " - training report"]), style=style, body=body, scripts=scripts(charts)
    )
