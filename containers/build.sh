#!/usr/bin/env bash
# Build the root file system of the image with one builder, and write it as one squashfs file.
#     build.sh BUILDER TARGET BASE OUTPUT WORK [MKSQUASHFS'S OPTIONS]   `python -m pipeline image` calls this
#     build.sh digest BUILDER BASE                                      print what BASE is today: sha256:..., or id:sha256:...
# IMAGE: name and inputs as JSON, for /etc/pipeline-image.json. PYTHON: an interpreter with pip, for mmdebstrap.
# WORK: a folder on a local disk, removed by the caller, who also renames OUTPUT.
set -euo pipefail
context=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

say() { echo "image: $*"; }

# An id of this build's own: under a constant tag another build, of whoever shares the daemon, may put its image in between.
build_tag() { echo "localhost/pipeline-image:$target-${work##*[./]}-$$"; }

# What the engines have in common: build, add the environment that Enroot would add, write the file.
build_engine() {
    local -r engine=$1
    local container tag

    tag=$(build_tag)
    # shellcheck disable=SC2064 # the tag of now; what it names is in the file by then
    trap "$engine image rm $tag >/dev/null 2>&1 || true" EXIT
    say "building $target from $base with $engine"
    DOCKER_BUILDKIT=1 "$engine" build --file "$context/Dockerfile" --target "$target" --tag "$tag" \
        --build-arg "${target^^}_BASE=$base" --build-arg "IMAGE=$IMAGE" "${secret[@]}" "$context"
    if command -v enroot >/dev/null; then
        local scheme=$engine
        if [[ $engine = docker ]]; then scheme=dockerd; fi
        say "importing with Enroot"
        ENROOT_SQUASH_OPTIONS="${squash[*]}" enroot import --output "$output" "$scheme://$tag"
        return
    fi
    say "writing the squashfs file"
    "$engine" image inspect --format '{{range .Config.Env}}{{println .}}{{end}}' "$tag" >"$work/environment"
    container=$("$engine" create "$tag" true)
    # shellcheck disable=SC2064 # the container of now
    trap "$engine rm --force $container >/dev/null; $engine image rm $tag >/dev/null 2>&1 || true" EXIT
    "$engine" cp "$work/environment" "$container:/etc/environment"
    "$engine" cp "$context/rc" "$container:/etc/rc"
    "$engine" export "$container" | mksquashfs - "$output" -tar "${all[@]}"
}

# Without a daemon: as root also where namespaces are not allowed.
build_buildah() {
    local container root tag

    tag=$(build_tag)
    # shellcheck disable=SC2064
    trap "${buildah[*]} rmi $tag >/dev/null 2>&1 || true" EXIT
    say "building $target from $base with buildah"
    "${buildah[@]}" build --isolation chroot --file "$context/Dockerfile" --target "$target" --tag "$tag" \
        --build-arg "${target^^}_BASE=$base" --build-arg "IMAGE=$IMAGE" "${secret[@]}" "$context"
    say "writing the squashfs file"
    container=$("${buildah[@]}" from --pull-never "$tag")
    # shellcheck disable=SC2064
    trap "${buildah[*]} rm $container >/dev/null; ${buildah[*]} rmi $tag >/dev/null 2>&1 || true" EXIT
    root=$("${buildah[@]}" mount "$container")
    "${buildah[@]}" inspect --format '{{range .OCIv1.Config.Env}}{{println .}}{{end}}' "$container" >"$root/etc/environment"
    install -m 755 "$context/rc" "$root/etc/rc"
    mksquashfs "$root" "$output" "${all[@]}" -wildcards -e 'dev/*'
}

# On a node of the cluster, in a Job: the containers' root is a name space of the user.
build_enroot() {
    local -r name="pipeline-image-$$"

    export ENROOT_TEMP_PATH=${ENROOT_TEMP_PATH:-$work} ENROOT_SQUASH_OPTIONS="${squash[*]}"
    say "importing $base with Enroot"
    enroot import --output "$work/base.sqsh" "$base"
    # shellcheck disable=SC2064
    trap "enroot remove --force $name || true" EXIT
    enroot create --name "$name" "$work/base.sqsh"
    say "installing packages"
    enroot start --root --rw --mount "$context:/context" "${settings[@]}" \
        --env "IMAGE=$IMAGE" "$name" bash /context/install.sh "$target"
    say "writing the squashfs file"
    enroot export --output "$output" "$name"
}

# From Debian's packages and Python's alone: no registry of images, no engine, no root where user name spaces are allowed.
build_mmdebstrap() {
    export SITE=$work/site VERSION=3.11 TMPDIR=$work # bookworm's Python, and that of requirements-cpu.txt
    local minor platforms=()

    for minor in {36..17}; do platforms+=(--platform "manylinux_2_${minor}_$(uname -m)"); done # its glibc, and older
    say "installing packages with pip"
    "$PYTHON" -m pip install --quiet --no-deps --require-hashes --only-binary :all: --no-compile --no-cache-dir \
        --implementation cp --python-version "$VERSION" "${platforms[@]}" --platform "manylinux2014_$(uname -m)" \
        --target "$SITE" --requirement "$context/requirements.txt" --requirement "$context/requirements-cpu.txt"
    say "making $base with mmdebstrap"
    # Without devices: whoever is not root cannot unpack them, and a container has those of its node.
    mkdir -p "$work/empty/dev"
    mmdebstrap --quiet --variant=minbase --skip=output/dev --include=python3,ca-certificates \
        --dpkgopt=path-exclude=/usr/share/man/* --dpkgopt=path-exclude=/usr/share/locale/* \
        --dpkgopt=path-exclude=/usr/share/doc/* --dpkgopt=path-include=/usr/share/doc/*/copyright \
        --customize-hook="$context/rootfs.sh" "$base" "$work/root.tar" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"}
    tar --append --file "$work/root.tar" --owner 0 --group 0 --directory "$work/empty" ./dev
    say "writing the squashfs file"
    mksquashfs - "$output" -tar "${all[@]}" <"$work/root.tar"
}

# An image of a registry has a digest of the registry's; one that was made here has only an id.
digest() {
    local -r base=$2
    local found=""

    case $1 in
    docker | podman)
        "$1" image inspect "$base" >/dev/null 2>&1 || "$1" pull --quiet "$base" >&2
        found=$("$1" image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$base" | sed -n 's/.*@//p;' | sed -n 1p)
        if [[ -z $found ]]; then found=id:$("$1" image inspect --format '{{.Id}}' "$base"); fi
        ;;
    buildah)
        if [[ $base = localhost/* ]]; then
            found=id:sha256:$("${buildah[@]}" inspect --type image --format '{{.FromImageID}}' "$base")
        else
            "${buildah[@]}" pull --quiet "$base" >&2
            found=$("${buildah[@]}" inspect --type image --format '{{.FromImageDigest}}' "$base")
        fi
        ;;
    enroot) found=$(enroot digest "$base") ;;
    esac
    echo "$found"
}

buildah=(buildah --storage-driver "${STORAGE_DRIVER:-vfs}")
if [[ $1 = digest ]]; then
    digest "$2" "$3"
    exit
fi
: "${IMAGE:?}" "${PYTHON:?}"
readonly target=$2 base=$3 output=$4 work=$5
readonly -a squash=("${@:6}")
readonly -a all=(-all-root -root-mode 0755 -noappend -no-progress "${squash[@]}") # a tar file says nothing of its root
secret=() settings=()
if [[ -f ${PIP_CONFIG_FILE:-} ]]; then # mounted while packages are installed, so that it is in no layer
    secret=(--secret "id=pip,src=$PIP_CONFIG_FILE") settings=(--mount "$PIP_CONFIG_FILE:/etc/pip.conf")
fi
case $1 in
docker | podman) build_engine "$1" ;;
buildah | enroot | mmdebstrap) "build_$1" ;;
*) echo "build.sh: $1: no such builder" >&2 && exit 2 ;;
esac
