# shellcheck shell=bash
# What every job script shares. Sourced from the Run's snapshot, after launch/<stage>.env has said where we are:
#   begin STAGE [SIGNAL]   name this attempt, ask whether it may work
#   step STAGE [ARRAY]     run a Stage in the allocation, by LAUNCH or another array; the first that fails ends the script
#   finish                 end with the exit code of the verdict
# shellcheck disable=SC2154 # run is set by the script that sources this

# Name this start of the Job: Slurm's ids under Slurm, the local scheduler's ids, or "hand" for a person at a prompt.
begin() {
    stage=$1 forward=${2:-} child='' status=0
    mkdir -p "$run/control" "$run/attempts" "$run/logs"
    if [[ $SCHEDULER = slurm ]]; then
        JOB_ID=$SLURM_JOB_ID ATTEMPT=${SLURM_RESTART_COUNT:-0} PIPELINE_TASK=''
        if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then # by the name that squeue and scancel have for it
            JOB_ID=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
            PIPELINE_TASK=$SLURM_ARRAY_TASK_ID/$((SLURM_ARRAY_TASK_MAX + 1))
        fi
        export PIPELINE_TASK PIPELINE_PHASE=${PIPELINE_PHASE:-}
        exec >>"$run/logs/$stage-$JOB_ID.$ATTEMPT.log" 2>&1 # one for each attempt: no requeue can overwrite it
    else
        JOB_ID=${PIPELINE_JOB_ID:-hand-$1} ATTEMPT=${PIPELINE_ATTEMPT:-0}
        export PIPELINE_SCRIPT=$$ # torchrun would outlive a killed script; its ranks look whether this process lives
        if [[ -z ${PIPELINE_ATTEMPT:-} ]]; then
            while [[ -e $run/attempts/$JOB_ID.$ATTEMPT.json ]]; do ATTEMPT=$((ATTEMPT + 1)); done
        fi
    fi
    PIPELINE_STARTED=$(date +%s.%N) # start-up time is counted from here
    export PIPELINE_STAGE=$stage PIPELINE_JOB_ID=$JOB_ID PIPELINE_ATTEMPT=$ATTEMPT PIPELINE_STARTED
    # Set before the stage starts, so that a signal in its first second is not lost.
    trap 'warn TERM' TERM
    trap 'warn INT' INT
    trap 'warn USR2' USR2
    trap 'warn HUP' HUP
    trap 'warn QUIT' QUIT
    if [[ $SCHEDULER = slurm ]]; then enter_allocation; fi
    if [[ -v CACHE_IMAGE ]]; then cache_image; fi
}

# Ask whether this attempt may work, and find what only the host knows: the container has no Slurm commands.
enter_allocation() {
    local rc=0 node
    echo "$stage: job $JOB_ID, attempt $ATTEMPT, on $SLURM_JOB_NODELIST, $(date -Is)"
    "$PYTHON" -m pipeline.host.jobscript begin "$run" "$stage" "$JOB_ID" "$ATTEMPT" || rc=$?
    if ((rc == 100)); then exit 0; fi # nothing to do
    if ((rc)); then exit "$rc"; fi
    read -r node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    # The address by which Slurm reaches the node: its name need not resolve everywhere.
    MASTER_ADDR=$(scontrol -o show node "$node" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    MASTER_ADDR=${MASTER_ADDR:-$node}
    # Another for each Job and attempt: ranks that Slurm could not kill may still hold the last one's.
    MASTER_PORT=$((20000 + (SLURM_JOB_ID + 997 * ATTEMPT) % 10000))
    while (exec 3<>"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null; do # someone listens there
        MASTER_PORT=$((20000 + (MASTER_PORT + 1) % 10000))
    done
    PIPELINE_NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
    # What Slurm has registered for the nodes, for preflight to compare with what is there.
    sinfo -n "$SLURM_JOB_NODELIST" -o "%20N %10c %10m %25f %G" >"$run/attempts/$JOB_ID.$ATTEMPT.sinfo" 2>/dev/null || true
    # What a job around this one may have asked for, or a person's shell of Pyxis, must not reach the steps.
    SLURM_EXPORT_ENV=ALL
    unset "${!PYXIS_CONTAINER_@}"
    export MASTER_ADDR MASTER_PORT PIPELINE_NODES SLURM_EXPORT_ENV
}

# Tell this attempt that its time is nearly up. Training reads the file at its next step. The other stages read it once,
# when they start, and then take the signal itself (begin's second word): they hold nothing that is worth waiting for.
warn() {
    local file=$run/control/warned.$JOB_ID.$ATTEMPT
    if [[ ! -e $file ]]; then printf '%s\n' "$1" >"$file"; fi # the first says why; more follow when a limit nears
    if [[ -n $forward && -n $child ]]; then kill -s "$forward" "$child" 2>/dev/null || true; fi
}

# Have each node copy the image to its own disk, and start the steps from there. A node without room says why.
cache_image() {
    local copy array i
    copy=$("$PYTHON" -m pipeline.image.cache name "$run" "$IMAGE_CACHE")
    attend "${CACHE_IMAGE[@]}" copy "$run" "$IMAGE_CACHE"
    if ((status == 3)); then return; fi # some node has not even a name for it: all start from the shared disk
    if ((status)); then finish; fi
    for array in PREFLIGHT LAUNCH; do
        local -n words=$array
        for i in "${!words[@]}"; do
            if [[ ${words[i]} = --container-image=* ]]; then words[i]=--container-image=$copy; fi
        done
    done
}

# Run a program and wait for it. In the background, or bash holds a trap back until it ends.
attend() {
    "$@" &
    child=$!
    while :; do
        status=0
        wait "$child" || status=$?
        # wait also returns when a trapped signal comes; the program may be alive then.
        kill -0 "$child" 2>/dev/null || break
    done
}

# Run one program of the Stage.
step() {
    local -n launch=${2:-LAUNCH}
    attend "${launch[@]}" -m "pipeline.stages.$1" "$run"
    # A step before the last leaves a verdict only where it was stopped or failed; several ranks that stop exit 0.
    if ((status)) || [[ $1 != "$stage" && -e $run/attempts/$JOB_ID.$ATTEMPT.json ]]; then finish; fi
}

# End with the exit code of the verdict.
finish() {
    exec "$PYTHON" -m pipeline.host.jobscript end "$run" "$stage" "$JOB_ID" "$ATTEMPT" "$status" "$SCHEDULER"
}
