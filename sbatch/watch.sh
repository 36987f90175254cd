#!/usr/bin/env bash
# While a pretrain Job runs: see every few minutes that another one waits behind it, and, with a fourth word, have evaluate
# Jobs submitted for its new checkpoints: bash watch.sh RUN PYTHON SCRIPT_PID [evaluate]
# It looks at a folder every few seconds, asks Slurm only when there is something new, and ends with the script.
set -uo pipefail

run=$1 python=$2 script=$3 evaluate=${4:-} newest='' tended=$SECONDS
while kill -0 "$script" 2>/dev/null; do
    now=''
    for manifest in "$run"/checkpoints/step-*/manifest.json; do now=$manifest; done
    if [[ $evaluate && $now != "$newest" && -e $now ]]; then
        newest=$now
        timeout -k 10 600 "$python" -m pipeline.evaluation.backfill "$run" || true
    fi
    if ((SECONDS - tended >= ${PIPELINE_TEND_SECONDS:-300})); then
        timeout -k 10 120 "$python" -m pipeline.host.jobscript tend "$run" "$PIPELINE_JOB_ID" "$PIPELINE_ATTEMPT" || true
        tended=$SECONDS
    fi
    sleep "${PIPELINE_WATCH_SECONDS:-15}"
done
