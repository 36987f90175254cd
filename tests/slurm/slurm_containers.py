"""Containers on a private Slurm: by Pyxis where it is installed, else by our plugin; and a small image to start."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from slurm_packages import CONTAINERS, lacking

SOURCE = Path(__file__).with_name("container_plugin.c")
PYXIS = "usr/lib*/slurm*/spank_pyxis.so", "usr/lib*/*/slurm*/spank_pyxis.so", "usr/local/lib*/slurm*/spank_pyxis.so"
COMPILE = ("gcc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")

ENVIRONMENT = "GREETING=from the image\nPATH=/opt/bin:/bin\n"
PROFILE = "export PROFILE=read\n"


def pyxis() -> Path | None:
    """Return this machine's own Pyxis, if it has one that works.

    $PYXIS_PLUGIN names one that lies elsewhere, with options for it after a blank.
    """
    named = os.environ.get("PYXIS_PLUGIN", "").split()
    found = [Path(named[0])] if named else [path for pattern in PYXIS for path in Path("/").glob(pattern)]
    return found[0] if found and shutil.which("enroot") else None


def runtime() -> str:
    """Say what starts the containers of a private Slurm here."""
    if why := reason():
        return f"none; {why}"
    return f"Pyxis, {path}" if (path := pyxis()) else "a stand-in for Pyxis, tests/slurm/container_plugin.c"


def reason() -> str:
    """Say why a private Slurm here can have no containers, and what to do; "" if it can."""
    if packages := lacking(CONTAINERS):
        return f"missing packages; as root: apt-get install {' '.join(packages)}"
    if pyxis():
        return ""
    if not Path("/dev/loop-control").exists():
        return "no /dev/loop-control: images are mounted by loop devices, for which a container needs the host's /dev"
    if int(Path("/proc/sys/user/max_user_namespaces").read_text()) == 0:
        return "no user namespaces: sysctl user.max_user_namespaces=10000"
    return ""


def plugstack(folder: Path) -> str:
    """Return what plugstack.conf must hold; the stand-in is compiled into `folder`, and mounts there."""
    if path := pyxis():
        (folder / "runtime").mkdir(parents=True)
        options = os.environ.get("PYXIS_PLUGIN", "").split()[1:]
        return f"required {path} runtime_path={folder}/runtime {' '.join(options)}\n"
    mounts = folder / "mounts"
    mounts.mkdir(parents=True)
    plugin = folder / "container_plugin.so"
    subprocess.run([*COMPILE, "-o", str(plugin), str(SOURCE)], check=True, timeout=120)
    return f"required {plugin} {mounts}\n"


def enroot_settings(folder: Path, host: str) -> dict[Path, Path]:
    """Return the file to be mounted over Enroot's settings on a host of the private Slurm, and where; none without.

    The hosts share this machine's disk, and a step's containers have one name on all of them.
    """
    program = shutil.which("enroot") if pyxis() else None
    if program is None:
        return {}
    named = re.search(r'^config::init "(.*)"$', Path(program).read_text(encoding="utf-8"), re.MULTILINE)
    if named is None:
        return {}
    place = folder / host
    place.mkdir(parents=True)
    place.chmod(0o1777)  # each user makes a folder of their own in it
    kinds = ("RUNTIME", "CACHE", "DATA")
    lines = [f"ENROOT_{kind}_PATH {place}/$(id -u)/{kind.lower()}" for kind in kinds]
    settings = place / "enroot.conf"
    settings.write_text(Path(named[1]).read_text(encoding="utf-8") + "\n".join(lines) + "\n")
    return {settings: Path(named[1])}


def copy_program(name: str, root: Path) -> Path:
    """Copy a program of this machine to /bin below `root`, and the libraries that it names to where they are here."""
    program = Path(shutil.which(name) or name)
    copy = root / "bin" / program.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(program, copy)
    named = subprocess.run(["ldd", str(program)], capture_output=True, text=True, timeout=30, check=False).stdout
    for library in re.findall(r"(/\S+) \(0x", named):  # none for a static one
        target = root / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, target)
    return copy


def build_small_image(folder: Path) -> Path:
    """Build an image of busybox: with an environment, a profile, and a program that only its own PATH finds."""
    root = folder / "root"
    busybox = copy_program("busybox", root)
    listed = subprocess.run([str(busybox), "--list"], capture_output=True, text=True, timeout=30, check=True).stdout
    (root / "root").mkdir()
    for applet in set(listed.split()) - {"busybox"}:
        (root / "bin" / applet).symlink_to("busybox")
    texts = {
        "etc/environment": ENVIRONMENT,
        "etc/profile": PROFILE,
        "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
        "opt/bin/only-in-the-image": "#!/bin/sh\necho found\n",
    }
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    image = folder / "small.sqsh"
    call = ["mksquashfs", str(root), str(image), "-quiet", "-no-progress", "-all-root", "-comp", "zstd"]
    subprocess.run(call, check=True, timeout=120, capture_output=True)
    return image
