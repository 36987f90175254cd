#!/usr/bin/env bash
# Start torchrun on one node, as the one task that srun runs there: bash node.sh TORCHRUN… -- PROGRAM…
# Only here is the node's number known: in the batch shell SLURM_NODEID is 0 for all.
set -euo pipefail

ulimit -S -c 0 # a core file would hold the secrets of the environment; slurmd's own limit is often none
torchrun=()
while [[ $1 != -- ]]; do
    torchrun+=("$1")
    shift
done
shift
: "${SLURM_NNODES:?this runs in a step of a Slurm job}"
# shellcheck source=sbatch/master.sh
source "${BASH_SOURCE[0]%/*}/master.sh"
exec "${torchrun[@]}" --nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" \
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "$@"
