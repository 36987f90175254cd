#!/usr/bin/env bash
# Write requirements.txt and requirements-cpu.txt anew from pyproject.toml, every package with its version and hashes:
#     python -m pip install pip-tools && bash containers/lock.sh
# Call it with Python 3.11 on x86-64, where pip finds the CPU build of torch (elsewhere it is a CUDA build of gigabytes).
set -euo pipefail
cd "$(dirname "$0")"

all=$(mktemp)
trap 'rm -f "$all"' EXIT
rm -f "$all" # else pip-compile keeps the versions that it finds there
python -m piptools compile --quiet --allow-unsafe --generate-hashes --strip-extras --no-annotate --no-header \
    --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --extra train --output-file "$all" ../pyproject.toml

# The second file holds what a base with a torch of its own must keep as it is.
split() {
    echo "# Written by lock.sh from pyproject.toml: $1"
    awk -v own="$2" '/^[A-Za-z]/ { with = /^(torch|numpy|setuptools)==/ } !/^#/ && NF && with == own' "$all"
}
split "all that a base with torch lacks" 0 >requirements.txt
split "torch and what it was built with, for the target cpu" 1 >requirements-cpu.txt
grep -q '^torch==.*+cpu' requirements-cpu.txt || {
    echo "lock.sh: pip found no CPU build of torch; point pip at an index that has one" >&2
    exit 3
}
