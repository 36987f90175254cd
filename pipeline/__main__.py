"""`python -m pipeline VERB`."""

import os

# pydantic would read the metadata of every installed package to look for plugins, of which we use none.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

from pipeline.cli.verbs import main

main()
