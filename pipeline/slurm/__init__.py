"""Slurm: its commands, its words, its nodes and the holes of its schedule."""
