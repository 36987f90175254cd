"""Units, Scores and Benchmarks, gates and releases, and evaluate Jobs for holes of the schedule."""
