# shellcheck shell=bash
# What every job script shares. Sourced from the Run's snapshot, after launch/<stage>.env has said where we are.

# Name this start of the Job: Slurm's ids under Slurm, the local scheduler's ids, or "hand" for a person at a prompt.
# shellcheck disable=SC2154 # run is set by the script that sources this
begin() {
    if [[ $SCHEDULER = slurm ]]; then
        JOB_ID=$SLURM_JOB_ID ATTEMPT=${SLURM_RESTART_COUNT:-0}
    else
        JOB_ID=${PIPELINE_JOB_ID:-hand-$1} ATTEMPT=${PIPELINE_ATTEMPT:-0}
        export PIPELINE_SCRIPT=$$ # torchrun would outlive a killed script; its ranks look whether this process lives
        if [[ -z ${PIPELINE_ATTEMPT:-} ]]; then
            while [[ -e $run/attempts/$JOB_ID.$ATTEMPT.json ]]; do ATTEMPT=$((ATTEMPT + 1)); done
        fi
    fi
    PIPELINE_STARTED=$(date +%s.%N) # start-up time is counted from here
    export PIPELINE_JOB_ID=$JOB_ID PIPELINE_ATTEMPT=$ATTEMPT PIPELINE_STARTED
    child=
    forward=${2:-}
    mkdir -p "$run/control" "$run/attempts"
    # Set before the stage starts, so that a signal in its first second is not lost.
    trap 'warn TERM' TERM
    trap 'warn INT' INT
    trap 'warn USR2' USR2
    trap 'warn HUP' HUP
}

# Tell this attempt that its time is nearly up. Training reads the file at its next step. The other stages read it once,
# when they start, and then take the signal itself (begin's second word): they hold nothing that is worth waiting for.
warn() {
    printf '%s\n' "$1" >"$run/control/warned.$JOB_ID.$ATTEMPT"
    if [[ -n $forward && -n $child ]]; then kill -s "$forward" "$child" 2>/dev/null || true; fi
}

# Wait for the stage and end with the exit code of its verdict.
supervise() {
    local rc
    child=$1
    while :; do
        rc=0
        wait "$child" || rc=$?
        # wait also returns when a trapped signal comes; the stage may be alive then.
        kill -0 "$child" 2>/dev/null || break
    done
    exec "$PYTHON" -m pipeline.verdict "$run" "$JOB_ID" "$ATTEMPT" "$rc"
}
