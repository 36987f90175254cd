"""The mains: one program per stage, started by sbatch/<stage>.sbatch."""
