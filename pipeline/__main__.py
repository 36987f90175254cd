"""`python -m pipeline VERB`."""

from pipeline.cli.verbs import main

main()
