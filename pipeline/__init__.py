"""Pre-train a language model on a Slurm cluster, or on this machine."""

__version__ = "0.2.0"
