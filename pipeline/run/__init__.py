"""A Run's folder: its records, owners, verdicts, and what is complete."""
