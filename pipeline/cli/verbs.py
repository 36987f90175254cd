"""The verbs. Each parses, calls one function and prints; heavy imports wait until a verb needs them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline import __version__
from pipeline.cli import compare as cli_compare
from pipeline.cli import place as cli_place
from pipeline.cli.words import AfterJson, ClusterName, Json, RunPath, What, Yes, emit, screen, talk
from pipeline.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, UserError

if TYPE_CHECKING:
    from pipeline.run.folder import Run

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Pre-train a language model, here or on a Slurm cluster: from text to a trained, evaluated, sampled model.",
)


def main() -> None:
    """Run the verb on the command line; a person's mistake is one message and exit 2, never a traceback."""
    _forget_other_verbs(sys.argv[1:2])
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
        code = code if isinstance(code, int) else EXIT_DONE
    except UserError as error:
        talk.print(f"error: {error}", style="red", soft_wrap=True)
        code = error.exit_code
    except typer.Abort:
        code = EXIT_INTERRUPTED
    except KeyboardInterrupt:
        talk.print("interrupted")
        code = EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough (| head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_DONE
    except Exception as error:
        show = getattr(error, "show", None)  # click's own: wrong words on the command line
        if show is None:
            raise
        show()
        code = getattr(error, "exit_code", 2)
    sys.exit(code)


def _forget_other_verbs(words: list[str]) -> None:
    """Leave only the verb that is called, if it is one: typer inspects every parameter of all that it has."""
    called = [verb for verb in app.registered_commands if verb.callback and verb.callback.__name__ in words]
    app.registered_commands = called or app.registered_commands


def pass_on(run: Path, *words: str, given: bytes | None = None) -> int | None:
    """Run a verb where the Run is, if that is elsewhere; return its exit code, None if the Run is here."""
    from pipeline.cluster import remote

    return remote.pass_on(run, *words, given=given)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def submit(
    what: What = None,
    cluster: ClusterName = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run, run nothing.")] = False,
    only: Annotated[str | None, typer.Option("--only", metavar="STAGE", help="Run this one stage.")] = None,
    test: Annotated[bool, typer.Option("--test", help="Ask Slurm whether it would take each Job; queue none.")] = False,
    yes: Yes = False,
    as_json: AfterJson = False,
) -> int:
    """Run the whole chain of a config, or what is missing of a Run: here, or as Jobs of a Slurm cluster."""
    from pipeline.submit import ask

    request = ask.request(what or [], cluster, only)
    if dry_run:
        return ask.show_plan(request, screen())
    from pipeline.submit import chain

    if test:
        return chain.test_plan(request, screen())
    code = chain.submit(request, talk, yes=yes, as_json=as_json)
    return _as_json(request.run, code) if as_json and request.there is None else code


@app.command()
def plan(what: What = None, cluster: ClusterName = None, as_json: Json = False) -> int:
    """Print the Jobs, their command lines and what was derived. Nothing is run or written."""
    from pipeline.plan.jobs import MisfitError
    from pipeline.submit import ask

    try:
        request = ask.request(what or [], cluster, None)
    except MisfitError as error:  # what a model costs can be asked on a machine that could never train it
        if not as_json:
            ask.print_derived(error.derived, screen())
        raise
    if as_json and request.there is None:
        emit(json.dumps(request.plan.to_json(), indent=2))
        ask.check_fit(request, talk)
        return EXIT_DONE
    return ask.show_plan(request, screen(), as_json=as_json)


@app.command()
def status(run: RunPath, as_json: Json = False) -> int:
    """Show how far a Run is."""
    if (code := pass_on(run, "status", "--json" if as_json else "")) is not None:
        return code
    from pipeline.run.folder import Run
    from pipeline.status.read import read_status
    from pipeline.status.view import print_status

    found = read_status(Run.open(run))
    if as_json:
        emit(json.dumps(found.to_json(), indent=2))
    else:
        print_status(found, screen(), source=True)
    return EXIT_FAILED if found.state == "failed" else EXIT_DONE


@app.command()
def logs(
    run: RunPath,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as the Run goes on.")] = False,
    stage: Annotated[str | None, typer.Option("--stage", metavar="STAGE", help="Of this stage alone.")] = None,
    lines: Annotated[
        int | None, typer.Option("-n", "--lines", metavar="N", min=1, help="The last lines of each file.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="As they are: colours, and whatever else a log may hold.")] = False,
) -> int:
    """Print the logs of a Run."""
    words = ["--follow" if follow else "", f"--stage={stage}" if stage else "", f"--lines={lines}" if lines else ""]
    words += ["--raw"] * raw
    if (code := pass_on(run, "logs", *words)) is not None:
        return code
    from pipeline.cluster.caller import end_with_caller
    from pipeline.run.folder import Run
    from pipeline.status.logs import read_logs

    if follow:
        end_with_caller()
    read_logs(Run.open(run), follow, stage, lines, sys.stdout, raw=raw)
    return EXIT_DONE


@app.command()
def window(run: RunPath, as_json: Json = False) -> int:
    """Show the holes of a cluster's schedule, and the evaluate Jobs that a Run would have submitted for them."""
    if (code := pass_on(run, "window", "--json" if as_json else "")) is not None:
        return code
    from pipeline.evaluation.window_view import look, print_window
    from pipeline.run.folder import Run

    found = look(Run.open(run))
    if as_json:
        emit(json.dumps(found, indent=2))
    else:
        print_window(found, screen())
    return EXIT_DONE


Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; kept in the record.")]


@app.command()
def promote(
    run: RunPath,
    step: Annotated[int, typer.Argument(metavar="STEP", help="A step that has a checkpoint.")],
    reason: Reason = "",
) -> int:
    """Make the checkpoint of a step the released one, and keep it from being removed."""
    if (code := pass_on(run, "promote", str(step), f"--reason={reason}")) is not None:
        return code
    from pipeline.evaluation import release
    from pipeline.run.folder import Run

    release.promote(Run.open(run), step, reason)
    emit(f"step {step} is released")
    return EXIT_DONE


@app.command()
def rollback(run: RunPath, reason: Reason = "") -> int:
    """Release again what was released before."""
    if (code := pass_on(run, "rollback", f"--reason={reason}")) is not None:
        return code
    from pipeline.evaluation import release
    from pipeline.run.folder import Run

    emit(f"step {release.rollback(Run.open(run), reason)['step']} is released again")
    return EXIT_DONE


@app.command()
def stop(run: RunPath, as_json: AfterJson = False) -> int:
    """End a Run cleanly at its next step; `resume` goes on."""
    return _control("stop", run, as_json)


@app.command()
def cancel(run: RunPath, as_json: AfterJson = False) -> int:
    """End a Run at once: all its Jobs are cancelled, those that wait for others first; `resume` goes on."""
    return _control("cancel", run, as_json)


@app.command()
def save(run: RunPath, as_json: AfterJson = False) -> int:
    """Have a Run that trains save a checkpoint at its next step, and go on."""
    return _control("save", run, as_json)


def _control(verb: str, run: Path, as_json: bool) -> int:
    """Ask something of a Run, wherever it is."""
    if (code := pass_on(run, verb, "--json" if as_json else "")) is not None:
        return code
    from pipeline.run.folder import Run
    from pipeline.submit import control

    told = {"stop": control.stop, "cancel": control.cancel, "save": control.save}[verb](Run.open(run))
    if as_json:
        talk.print(told, soft_wrap=True)
        return _as_json(Run.open(run), EXIT_DONE)
    emit(told)
    return EXIT_DONE


def _as_json(run: Run, code: int) -> int:
    """Print what `status --json` does, as the one thing on stdout; return the verb's own exit code."""
    from pipeline.status.read import read_status

    emit(json.dumps(read_status(run).to_json(), indent=2))
    return code


@app.command()
def resume(
    run: RunPath,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key.path=value", help="Changes of the Run's config.")
    ] = None,
    cluster: ClusterName = None,
    yes: Yes = False,
    as_json: AfterJson = False,
) -> int:
    """Run what is missing of a Run, where it ran before; takes back a `stop`."""
    from pipeline.run.folder import Run
    from pipeline.submit import ask, chain

    found = Run.open(run)
    ask.check_resume(found, overrides or [])
    place = cluster if cluster is not None or found.cluster.is_file() else "local"
    request = ask.request([str(found.root), *(overrides or [])], place, None)
    code = chain.submit(request, talk, yes=yes, resume=True, as_json=as_json)
    return _as_json(request.run, code) if as_json and request.there is None else code


@app.command()
def shell(
    run: RunPath,
    limit: Annotated[str, typer.Option("--time", metavar="TIME", help="Time limit, as Slurm reads it.")] = "1:00:00",
) -> None:
    """Open a shell on a node of a Run's cluster, with the same options, GPUs and environment as its training."""
    from pipeline.cluster.remote import there_of
    from pipeline.config.load import load_run_config
    from pipeline.run.folder import Run
    from pipeline.submit.shell import open_shell

    found = Run.open(run)
    if there := there_of(found):
        there.shell(limit)
    open_shell(found, load_run_config(found.config), limit)


@app.command()
def report(run: RunPath) -> None:
    """Write report.html of a Run as it is now."""
    from pipeline.cluster.remote import there_of
    from pipeline.report.write import write_report
    from pipeline.run.folder import Run

    found = Run.open(run)
    there = there_of(found)
    emit(str(there.report() if there else write_report(found)))


@app.command()
def export(
    run: RunPath,
    step: Annotated[int | None, typer.Argument(metavar="STEP", help="Without it: the newest checkpoint.")] = None,
    precision: Annotated[str, typer.Option("--precision", metavar="fp32|bf16", help="Of the weights.")] = "fp32",
) -> int:
    """Write a checkpoint to RUN/export in Hugging Face's form, which transformers and vLLM load."""
    if (code := pass_on(run, "export", "" if step is None else str(step), f"--precision={precision}")) is not None:
        return code
    from pipeline.inference.exporting import export

    return export(run, step, precision)


@app.command()
def generate(
    run: RunPath,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", help="Of the section inference, such as temperature=0.")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="Text to go on from; several are allowed.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="Prompts: .jsonl or .txt; - is standard input.")
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", metavar="STEP", help="Without it: the newest checkpoint.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Let a checkpoint go on from prompts: one as it comes, several as JSON lines."""
    from pipeline.inference.generate import Wish, elsewhere, generate

    wish = Wish.read(run, overrides or [], prompt or [], file, step, as_json)
    words, given = elsewhere(wish)
    if (code := pass_on(run, "generate", *words, given=given)) is not None:
        return code
    return generate(wish)


for verb in (cli_compare.compare, cli_place.init, cli_place.doctor, cli_place.image, cli_place.schema):
    app.command()(verb)
