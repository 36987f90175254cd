#!/usr/bin/env bash
# Write the image's requirements.txt and requirements-cpu.txt anew from pyproject.toml, and requirements.lock.txt above, by
# which nox installs, every package with its version and hashes:
#     python -m pip install pip-tools && bash containers/lock.sh
# Call it with Python 3.11 on x86-64, where pip finds the CPU build of torch (elsewhere it is a CUDA build of gigabytes).
set -euo pipefail
cd "$(dirname "$0")"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
all=$work/train.txt

# compile OUTPUT OPTION… - the options name extras of pyproject.toml, and constraints
compile() {
    python -m piptools compile --quiet --allow-unsafe --generate-hashes --strip-extras --no-annotate --no-header \
        --no-emit-index-url --no-emit-find-links --no-emit-trusted-host "${@:2}" --output-file "$1" ../pyproject.toml
}
compile "$all" --extra train

# The second file holds what a base with a torch of its own must keep as it is.
split() {
    echo "# Written by lock.sh from pyproject.toml: $1"
    awk -v own="$2" '/^[A-Za-z]/ { with = /^(torch|numpy|setuptools)==/ } !/^#/ && NF && with == own' "$all"
}
split "all that a base with torch lacks" 0 >requirements.txt
split "torch and what it was built with, for the target cpu" 1 >requirements-cpu.txt
# Here the same versions as in the image, and what tests and lint need besides. Torch has no hash: its build differs by index.
sed 's/ \\$//; /--hash/d; /^#/d' "$all" >"$work/held.txt"
compile "$work/nox.txt" --extra train --extra report --extra test --extra lint --constraint "$work/held.txt"
{
    echo "# Written by containers/lock.sh from pyproject.toml: what nox installs, all but torch, whose build differs by index"
    awk '/^[A-Za-z]/ { own = /^torch==/ } !/^#/ && NF && !own' "$work/nox.txt"
} >../requirements.lock.txt
grep -q '^torch==.*+cpu' requirements-cpu.txt || {
    echo "lock.sh: pip found no CPU build of torch; point pip at an index that has one" >&2
    exit 3
}
