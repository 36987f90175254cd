#!/usr/bin/env bash
# Install the packages of a target in the image, where a base with pip is: install.sh cpu|gpu
# IMAGE: the image's name and inputs as JSON.
set -euo pipefail
context=$(CDPATH='' cd "$(dirname "$0")" && pwd)

lists=(--requirement "$context/requirements.txt")
# On a GPU torch, and what it was built with, stay those of the base: they fit its CUDA and NCCL.
if [[ $1 = cpu ]]; then lists+=(--requirement "$context/requirements-cpu.txt"); fi
# A base may hold its own packages to certain versions by PIP_CONSTRAINT; ours have their hashes.
env -u PIP_CONSTRAINT PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 \
    python3 -m pip install --no-cache-dir --no-deps --require-hashes --only-binary :all: "${lists[@]}"
if ! command -v python >/dev/null; then ln -s "$(command -v python3)" /usr/local/bin/python; fi
printf '%s\n' "$IMAGE" >/etc/pipeline-image.json
