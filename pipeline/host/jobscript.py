"""What a job script asks on the host, outside the container: `pipeline.host.jobscript begin|end RUN STAGE JOB N`.

Begin: may this attempt work, and does it own the Run? End: how did it end, and what goes on? Both ask Slurm, which the
container cannot. Their exit codes become the script's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import EXIT_DONE, EXIT_STORAGE, EXIT_USAGE, UserError
from pipeline.host.allocation import write_allocation
from pipeline.run.folder import Run
from pipeline.run.records import read_record
from pipeline.run.verdict import EXIT_CODES, await_owner, read_verdict, say, write_verdict

if TYPE_CHECKING:
    from pipeline.host.begin import HostBegin


def local_end(run: Run, stage: str, job_id: str, number: int, exit_status: int) -> int:
    """Say how an attempt without Slurm ended: the local scheduler, or a person, decides what goes on."""
    await_owner(run, job_id, number, stage)
    record = read_verdict(run, job_id, number, stage, exit_status)
    if read_record(run.verdict(job_id, number)).get("stage") != stage:  # otherwise the stage has said it
        say(f"{record['verdict']}: {record['reason']}")
        write_verdict(run, job_id, number, stage, record["verdict"], record["reason"], record["step"])
    run.warned(job_id, number).unlink(missing_ok=True)
    return EXIT_CODES[record["verdict"]]


def _with_allocation(host: HostBegin) -> int:
    """Begin; where the attempt may work, tell the batch shell about its allocation."""
    code = host.begin()
    if code == EXIT_DONE:
        slurm = host.slurm if host.cluster.nodes_may_submit else None
        attempt = (host.job_id, host.number)
        write_allocation(host.run.allocation(*attempt), host.run.sinfo(*attempt), os.environ, slurm)
    return code


def main(argv: list[str]) -> int:
    """Serve sbatch/lib.sh."""
    usage = "usage: jobscript begin RUN STAGE JOB ATTEMPT | end RUN STAGE JOB ATTEMPT STATUS slurm|local"
    if len(argv) not in (5, 7) or not argv[4].isdigit():
        print(usage, file=sys.stderr)
        return EXIT_USAGE
    verb, run, stage, job_id, number = argv[0], Run(Path(argv[1])), argv[2], argv[3], int(argv[4])
    try:
        if stage == "evaluate" and (verb == "begin" or argv[6] == "slurm"):
            from pipeline.host.evaluate import EvaluateBegin, EvaluateEnd

            if verb == "begin":
                return _with_allocation(EvaluateBegin(run, stage, job_id, number))
            return EvaluateEnd(run, stage, job_id, number).end(int(argv[5]))
        if verb == "begin":
            from pipeline.host.begin import HostBegin

            return _with_allocation(HostBegin(run, stage, job_id, number))
        if argv[6] == "local":
            return local_end(run, stage, job_id, number, int(argv[5]))
        from pipeline.host.end import HostEnd

        return HostEnd(run, stage, job_id, number).end(int(argv[5]))
    except UserError as error:
        say(f"{stage}: {error}")
        return error.exit_code
    except OSError as error:  # not even a verdict can be written
        say(f"{stage}: storage: {error}")
        return EXIT_STORAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
