#!/usr/bin/env bash
# Run a program in an image without Enroot: smoke.sh IMAGE CODE WORK PROGRAM [ARGUMENT ...]
# To be called in a mount name space of its own: unshare --mount, as root, or unshare --map-root-user --mount.
# CODE is at /pipeline there, read-only. WORK is a folder here, in which the image is unpacked where it cannot be mounted.
set -euo pipefail
readonly image=$1 code=$2 work=$3
shift 3

root=$work/root memory=$work/memory
mkdir -p "$root" "$memory"
mount -t tmpfs none "$memory"
mkdir "$memory/lower" "$memory/upper" "$memory/work"
if mount -t squashfs -o loop,ro "$image" "$memory/lower" 2>/dev/null; then
    mount -t overlay -o "lowerdir=$memory/lower,upperdir=$memory/upper,workdir=$memory/work" none "$root"
else # no loop device, or not ours to mount
    unsquashfs -quiet -no-progress -force -dest "$root" "$image" >/dev/null
fi
for folder in dev proc sys; do
    mkdir -p "$root/$folder"
    mount --rbind "/$folder" "$root/$folder"
done
mkdir -p "$root/pipeline" "$root/tmp"
mount --bind -o ro "$code" "$root/pipeline"
# Nothing of this machine's environment: what the image needs must be in it.
exec chroot "$root" env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp \
    PYTHONPATH=/pipeline PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 "$@"
