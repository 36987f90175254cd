"""What a job script asks on the host, outside the container: `pipeline.host.jobscript begin|end|rescue|tend …`.

begin: may this attempt work, does it own the Run, and who goes on after it? end: how did it end, and what follows?
rescue: the script ended before it could ask that. tend: beside training, is there still a successor? All may ask Slurm,
which the container cannot. Their exit codes become the script's.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import EXIT_NOT_READY, EXIT_STORAGE, EXIT_USAGE, UserError
from pipeline.run.attempts import settle
from pipeline.run.folder import Run
from pipeline.run.records import BeginRecord
from pipeline.run.verdict import CRASH, EXIT_CODES, OF_EXIT_CODE, await_owner, how_it_ended, said_of, say, write_said

USAGE = (
    "usage: jobscript begin RUN STAGE JOB ATTEMPT | end RUN STAGE JOB ATTEMPT STATUS slurm|local | "
    "rescue RUN STAGE JOB ATTEMPT STATUS | tend RUN JOB ATTEMPT"
)
WORDS = {"begin": 4, "end": 6, "rescue": 5, "tend": 3}
DIED = 1  # the answer itself failed; the script then asks for rescue, or puts its Job back


def local_end(run: Run, stage: str, job_id: str, number: int, exit_status: int) -> int:
    """Say how an attempt without Slurm ended: the local scheduler, or a person, decides what goes on."""
    await_owner(run, job_id, number, stage)
    said = how_it_ended(run, job_id, number, stage, exit_status)
    own = said_of(run, job_id, number)
    if own is None or own.stage != stage:  # otherwise the stage has said it
        say(f"{said.verdict}: {said.reason}")
    begin = BeginRecord(job_id=job_id, number=number, stage=stage, time=said.began or said.time)
    settle(run, begin, said, None)
    run.warned(job_id, number).unlink(missing_ok=True)
    return EXIT_CODES[said.verdict]


def answer(verb: str, run: Run, stage: str, job_id: str, number: int, words: list[str]) -> int:
    """Return the exit code for one question."""
    if verb == "end" and words[1] == "local":
        return local_end(run, stage, job_id, number, int(words[0]))
    from pipeline.host.begin import HostBegin
    from pipeline.host.end import HostEnd
    from pipeline.host.evaluate import EvaluateBegin, EvaluateEnd

    Begin, End = (EvaluateBegin, EvaluateEnd) if stage == "evaluate" else (HostBegin, HostEnd)
    questions: dict[str, Callable[[], int]] = {
        "begin": lambda: Begin(run, stage, job_id, number).begin(),
        "end": lambda: End(run, stage, job_id, number).end(int(words[0])),
        "rescue": lambda: _but_one(End(run, stage, job_id, number).rescue(int(words[0]))),
        "tend": lambda: End(run, stage, job_id, number).tend(),
    }
    return questions[verb]()


def _but_one(code: int) -> int:
    """Return another code in place of 1, which says that there was no answer."""
    return EXIT_NOT_READY if code == DIED else code


def main(argv: list[str]) -> int:
    """Serve sbatch/lib.sh."""
    verb, words = (argv[0], argv[1:]) if argv else ("", [])
    if verb == "tend":
        words = [*words[:1], "pretrain", *words[1:]]
    if WORDS.get(verb) != len(argv) - 1 or not words[3].isdigit():
        print(USAGE, file=sys.stderr)
        return EXIT_USAGE
    run, stage = Run(Path(words[0])), words[1]
    try:
        return answer(verb, run, stage, words[2], int(words[3]), words[4:])
    except UserError as error:
        say(f"{stage}: {error}")
        if verb != "begin":
            return error.exit_code
        # What follows from it is decided by the rules, as for any other end, and not by leaving the queue as it is.
        write_said(run, words[2], int(words[3]), stage, OF_EXIT_CODE.get(error.exit_code, CRASH), str(error), None)
        return DIED
    except OSError as error:  # not even a verdict can be written
        say(f"{stage}: storage: {error}")
        return DIED if verb in ("begin", "rescue") else EXIT_STORAGE
    except Exception:
        say(traceback.format_exc())
        return DIED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
