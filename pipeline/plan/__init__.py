"""The Plan: Jobs with their command lines, and what they will cost."""
