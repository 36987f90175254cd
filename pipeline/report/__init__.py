"""report.html: one file without a network."""
