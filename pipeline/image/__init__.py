"""The container image: built, named, cached on nodes, and given to srun."""
