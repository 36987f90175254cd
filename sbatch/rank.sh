#!/usr/bin/env bash
# Start one rank, as one of several tasks that srun runs on each node: bash rank.sh PROGRAM…
# Where srun starts the ranks itself (launcher: srun), this says what torchrun would have said.
set -euo pipefail

: "${SLURM_PROCID:?this runs in a step of a Slurm job}"
# shellcheck source=sbatch/master.sh
source "${BASH_SOURCE[0]%/*}/master.sh"
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID GROUP_RANK=$SLURM_NODEID
export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
exec "$@"
