"""Model, data and training: knows tensors and files, nothing of jobs or Slurm."""
