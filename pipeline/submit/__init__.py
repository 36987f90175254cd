"""From a Plan to Jobs that run, on Slurm or on this machine."""
