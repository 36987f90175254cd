#!/usr/bin/env bash
# While a pretrain Job runs, have evaluate Jobs submitted for its new checkpoints: bash watch.sh RUN PYTHON SCRIPT_PID
# It looks at a folder every few seconds, asks Slurm only when there is something new, and ends with the script.
set -uo pipefail

run=$1 python=$2 script=$3 newest=''
while kill -0 "$script" 2>/dev/null; do
    now=''
    for manifest in "$run"/checkpoints/step-*/manifest.json; do now=$manifest; done
    if [[ $now != "$newest" && -e $now ]]; then
        newest=$now
        "$python" -m pipeline.evaluation.backfill "$run" || true
    fi
    sleep "${PIPELINE_WATCH_SECONDS:-15}"
done
