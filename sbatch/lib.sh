# shellcheck shell=bash
# What every job script shares. Sourced from the Run's snapshot, after launch/<stage>.env has said where we are:
#   begin STAGE [SIGNAL]   name this attempt, ask whether it may work
#   step STAGE [ARRAY]     run a Stage in the allocation, by LAUNCH or another array; the first that fails ends the script
#   finish                 end with the exit code of the verdict
# Under Slurm any other end of the script, an error of bash's or of `begin` itself, goes on by `rescue`.
# A node need have no command of Slurm's but srun; only where MAY_SUBMIT is set does rescue try another one.
# shellcheck disable=SC2154 # run is set by the script that sources this

HOST_SECONDS=${PIPELINE_HOST_SECONDS:-1800} # for one question to the host: it asks Slurm again while the controller is away
PORTS=1000                                  # that are looked at for a free one
REQUEUES=3                                  # that this script may ask for where not even `rescue` can run

# What is said before the attempt has a log of its own. The Jobs of the chain have --output=/dev/null: Slurm starts no Job
# whose output it cannot open, so a node that does not see the Run would end the chain before a line of ours is run.
if [[ ${SLURM_JOB_ID:-} && /dev/stdout -ef /dev/null && -n ${stage:-} ]]; then
    first=$run/logs/$stage-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}.slurm.log
    if { mkdir -p "$run/logs" && : >>"$first"; } 2>/dev/null; then exec >>"$first" 2>&1; fi
fi

begin() {
    stage=$1 forward=${2:-} child='' status=0
    if [[ $SCHEDULER = slurm ]]; then name_slurm_attempt; else name_local_attempt; fi
    mkdir -p "$run/control" "$run/attempts" "$run/logs"
    if [[ $SCHEDULER = slurm ]]; then
        exec >>"$run/logs/$stage-$JOB_ID.$ATTEMPT.log" 2>&1 # one for each attempt: no requeue can overwrite it
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

# Name this start of the Job by Slurm's ids. From here on no end of the script ends the chain.
name_slurm_attempt() {
    JOB_ID=${SLURM_JOB_ID:?the Run is planned for Slurm: use sbatch, not bash} ATTEMPT=${SLURM_RESTART_COUNT:-0} PIPELINE_TASK=''
    if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then # by the name that squeue and scancel have for it
        JOB_ID=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
        PIPELINE_TASK=$SLURM_ARRAY_TASK_ID/$((SLURM_ARRAY_TASK_MAX + 1))
    fi
    export PIPELINE_TASK PIPELINE_PHASE=${PIPELINE_PHASE:-}
    trap rescue EXIT
}

# Name it by the local scheduler's ids, or "hand" for a person at a prompt.
name_local_attempt() {
    JOB_ID=${PIPELINE_JOB_ID:-hand-$stage} ATTEMPT=${PIPELINE_ATTEMPT:-0}
    export PIPELINE_SCRIPT=$$ # torchrun would outlive a killed script; its ranks look whether this process lives
    if [[ -z ${PIPELINE_ATTEMPT:-} ]]; then
        while [[ -e $run/attempts/$JOB_ID.$ATTEMPT ]] || has_said; do ATTEMPT=$((ATTEMPT + 1)); done
    fi
}

# Tell whether the host has settled how this attempt ended; or a rank has said it.
is_settled() { [[ -e $run/attempts/$JOB_ID.$ATTEMPT/verdict.json || -e $run/attempts/$JOB_ID.$ATTEMPT.json ]]; }
has_said() { [[ -e $run/attempts/$JOB_ID.$ATTEMPT/said.json ]] || is_settled; }

# Ask on the host: ask VERB WORD… The container has no Slurm commands. Whatever hangs there, a file system or Slurm, ends
# with 137. Not by `timeout`, which hands on the signals that a requeue sends and then kills what still has to speak.
ask() {
    local asked started=$SECONDS pause=0.1
    "$PYTHON" -m pipeline.host.jobscript "$1" "$run" "$stage" "$JOB_ID" "$ATTEMPT" "${@:2}" &
    asked=$!
    while kill -0 "$asked" 2>/dev/null; do
        if ((SECONDS - started > HOST_SECONDS + 10)); then return 137; fi # not even SIGKILL reaches it
        if ((SECONDS - started > HOST_SECONDS)); then kill -KILL "$asked" 2>/dev/null || true; fi
        if ((SECONDS - started > 5)); then pause=1; fi
        sleep "$pause" || true
    done
    wait "$asked"
}

# Tell an answer of the host's from its death: by an exception (1), by a signal or time (137), or for want of an
# interpreter (126, 127).
is_answer() { [[ $1 =~ ^(0|[2-6]|75|100)$ ]]; }

# End with an answer of the host's; 100: there is nothing to do.
leave() {
    trap - EXIT
    if (($1 == 100)); then exit 0; fi
    exit "$1"
}

# Ask whether this attempt may work, and learn where its ranks find each other.
enter_allocation() {
    local rc=0 env=$run/attempts/$JOB_ID.$ATTEMPT/allocation.env
    echo "$stage: job $JOB_ID, attempt $ATTEMPT, on $SLURM_JOB_NODELIST, $(date -Is)"
    ask begin || rc=$?
    if ((rc)) && is_answer "$rc"; then leave "$rc"; fi
    if ((rc)); then exit "$rc"; fi
    PIPELINE_BATCH_NODE=${SLURMD_NODENAME:-$HOSTNAME} PIPELINE_NODES=''
    # shellcheck source=/dev/null
    if [[ -e $env ]]; then source "$env"; fi
    if [[ -z $PIPELINE_NODES && ${SLURM_JOB_NUM_NODES:-1} = 1 ]]; then PIPELINE_NODES=$PIPELINE_BATCH_NODE; fi
    MASTER_ADDR=${PIPELINE_NODES%%,*} # a name; master.sh finds what it means on each node
    MASTER_ADDR=${MASTER_ADDR:-$PIPELINE_BATCH_NODE}
    # Another for each Job and attempt: ranks that Slurm could not kill may still hold the last one's.
    MASTER_PORT=$((20000 + (SLURM_JOB_ID + 997 * ATTEMPT) % 10000))
    local tries=0
    while is_taken "$MASTER_PORT"; do
        if ((++tries > PORTS)); then
            echo "$stage: none of $PORTS ports from 20000 to 29999 is free on $PIPELINE_BATCH_NODE" >&2
            exit 1
        fi
        MASTER_PORT=$((20000 + (MASTER_PORT + 1) % 10000))
    done
    # What a job around this one may have asked for, or a person's shell of Pyxis, must not reach the steps.
    SLURM_EXPORT_ENV=ALL
    unset "${!PYXIS_CONTAINER_@}" SLURM_JWT # 22.05 hands a person's token on to the Job; it would end before the Job does
    export MASTER_ADDR MASTER_PORT PIPELINE_NODES PIPELINE_BATCH_NODE SLURM_EXPORT_ENV
}

# Tell whether a process here listens on a port, by any of the node's addresses. The kernel's list needs no name and no
# connection, either of which may hang.
is_taken() {
    local hex
    printf -v hex %04X "$1"
    grep -Eqs ":$hex 0+:0000 0A " /proc/net/tcp /proc/net/tcp6
}

# Tell this attempt that its time is nearly up. Training reads the file at its next step. The other stages read it once,
# when they start, and then take the signal itself (begin's second word): they hold nothing that is worth waiting for.
warn() {
    local file=$run/control/warned.$JOB_ID.$ATTEMPT
    if [[ ! -e $file ]]; then printf '%s\n' "$1" >"$file" || true; fi # the first says why; more follow when a limit nears
    if [[ -n $forward && -n $child ]]; then kill -s "$forward" "$child" 2>/dev/null || true; fi
}

# Have each node copy the image to its own disk, and start the steps from there. A node without room says why.
cache_image() {
    local copy array i
    copy=$(timeout -k 10 60 "$PYTHON" -m pipeline.image.cache name "$run" "$IMAGE_CACHE") || status=$?
    if ((status)); then finish; fi
    attend timeout -k 10 "$HOST_SECONDS" "${CACHE_IMAGE[@]}" copy "$run" "$IMAGE_CACHE"
    case $status in
    0) ;;
    3 | 124 | 137) return ;; # some node has not even a name for it, or a disk that hangs: start from the shared disk
    *) finish ;;
    esac
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
    attend ${SECRETS[@]+"${SECRETS[@]}"} "${launch[@]}" -m "pipeline.stages.$1" "$run" # what becomes srun reads the secrets
    # A step before the last leaves a verdict only where it was stopped or failed; several ranks that stop exit 0.
    if ((status)) || { [[ $1 != "$stage" ]] && has_said; }; then finish; fi
}

# End with the exit code of the verdict.
finish() {
    local rc=0
    if [[ $SCHEDULER != slurm ]]; then
        exec "$PYTHON" -m pipeline.host.jobscript end "$run" "$stage" "$JOB_ID" "$ATTEMPT" "$status" "$SCHEDULER"
    fi
    trap '' TERM INT USR2 HUP QUIT # a requeue sends TERM before the host has said all that it has to
    ask end "$status" slurm || rc=$?
    # 1 is the verdict "crash", and also what Python ends with where no verdict could be written.
    if is_answer "$rc" || { ((rc == 1)) && is_settled; }; then leave "$rc"; fi
    exit "$rc"
}

# The script ends before its verdict is there. Have the host decide what goes on; where it cannot, queue this Job again.
rescue() {
    local code=$? rc=0
    trap - EXIT
    trap '' TERM INT USR2 HUP QUIT
    set +e
    echo "$stage: the job script ends before its time, with $code" >&2
    ask rescue "$code" || rc=$?
    if is_answer "$rc"; then leave "$rc"; fi
    if [[ ${MAY_SUBMIT:-} ]] && ((ATTEMPT < REQUEUES)); then requeue; fi
    exit $((code ? code : 1))
}

# Put this Job back into the queue, unless Slurm has done so, or has given it another attempt while this one hung.
requeue() {
    if [[ $(timeout -k 5 20 scontrol -o show job "$JOB_ID" 2>/dev/null) = *" Restarts=$ATTEMPT "* ]]; then
        echo "$stage: queues itself again: neither its verdict nor a rescue could be made" >&2
        timeout -k 5 20 scontrol update "JobId=$JOB_ID" Requeue=1 # a Segment is submitted with --no-requeue
        timeout -k 5 20 scontrol requeue "$JOB_ID"
    fi
}
