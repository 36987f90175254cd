# shellcheck shell=bash
# Where rank 0 listens, found on each node. Sourced by node.sh and rank.sh in a step of srun's.
# MASTER_ADDR is the name of the first node. It may resolve to nothing here, to a network that others cannot reach, or, as
# a host's own name often does, to loopback. What surely leads there is the address from which the call of srun came:
# Slurm itself sends the step's output back to it. But that is the batch node's, which may have been chosen as another.

: "${MASTER_ADDR:?}" "${MASTER_PORT:?}"
if [[ $MASTER_ADDR = "${PIPELINE_BATCH_NODE:-}" ]]; then
    case ${SLURM_LAUNCH_NODE_IPADDR:-} in
    '' | 127.* | ::1 | ::ffff:127.* | 0.0.0.0 | ::) ;; # on the batch node itself, or where all nodes are one machine
    *) export MASTER_ADDR=$SLURM_LAUNCH_NODE_IPADDR ;;
    esac
fi
