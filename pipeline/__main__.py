"""`python -m pipeline VERB`."""

from pipeline.cli import main

main()
