"""How a Run is doing: read from records and from Slurm, shown on a terminal."""
