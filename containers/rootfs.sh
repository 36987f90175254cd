#!/usr/bin/env bash
# Finish the root file system that mmdebstrap makes; mmdebstrap calls this with its folder.
# SITE: the folder of Python packages, IMAGE: the image's name and inputs as JSON, VERSION: the root's Python.
set -euo pipefail
root=$1

packages=/usr/local/lib/python$VERSION/dist-packages
mkdir -p "$root$packages"
cp -r "$SITE/." "$root$packages"
if [[ -d $root$packages/bin ]]; then # programs like torchrun; pip wrote the Python of the builder into them
    find "$root$packages/bin" -type f -exec sed -i '1s|^#!.*python.*|#!/usr/bin/python3|' {} +
    mv "$root$packages/bin/"* "$root/usr/local/bin/"
    rmdir "$root$packages/bin"
fi
ln -sf /usr/bin/python3 "$root/usr/local/bin/python"
chmod -R go=u-w "$root$packages" "$root/usr/local/bin" # whoever runs it is not who built it
# Hashes, not times: a copy of the image must not make Python compile thousands of files at every start.
chroot "$root" python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash "$packages" >/dev/null || true
printf '%s\n' "$IMAGE" >"$root/etc/pipeline-image.json"
# Enroot reads these two; what stands in the first wins over the variables of a Job, so it is little.
printf '%s\n' PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 >"$root/etc/environment"
install -m 755 "$(dirname "$0")/rc" "$root/etc/rc"
