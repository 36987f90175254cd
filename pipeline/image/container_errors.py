"""Why a step had no container: what Pyxis and Enroot say in a job's log, as node, cause and remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.run.blame import Fault, blamed_nodes
from pipeline.run.cause import BUSY
from pipeline.run.verdict import ENVIRONMENT

# slurmstepd-n1: error: pyxis:     [ERROR] No such file or directory: /images/train.sqsh
SAID = re.compile(r"^(?:\d+: )?slurmstepd(?:-(?P<node>\S+))?: error: pyxis: *(?P<text>.*)$", re.M)
NAMED, LINE = 8, 300  # nodes, and characters of a line, that a reason has
UNKNOWN_OPTION = re.compile(r"^srun: (?:error: )?(?:unrecognized|unknown|invalid) option.*--container-.*$", re.M)


class Cause(NamedTuple):
    """`pattern` is what Enroot says, `kind` what a node may be blamed for: one of blame.KINDS, or nothing.

    With `final` no other node would do better, so that the chain ends.
    """

    pattern: str
    cause: str
    remedy: str
    kind: str = ""
    final: bool = False


CODE = r"returned error(?: code)?: "  # of Enroot, and of curl
CAUSES = (
    Cause(
        r"No space left on device|Disk quota exceeded|Not enough space",
        "Enroot has no room for the image",
        "free space in its folders (enroot.conf: ENROOT_DATA_PATH, ENROOT_CACHE_PATH, ENROOT_TEMP_PATH), or ask an "
        "administrator to have Pyxis mount images: use_squashfuse=1",
        "disk",
    ),
    Cause(
        r"(?:mkdir|cannot create|couldn't mkdir).*Permission denied|Permission denied.*(?:enroot|pyxis)",
        "Enroot may not make its folders",
        "ask an administrator to let users write to those of enroot.conf (ENROOT_RUNTIME_PATH, ENROOT_CACHE_PATH, "
        "ENROOT_DATA_PATH); a cache that several users share must be writable for each",
        "container",
    ),
    Cause(
        rf"{CODE}(?:429|5\d\d)\b|toomanyrequests|Too Many Requests",
        f"the registry {{registry}} {BUSY}",
        "the next attempt waits a while; to need no registry, build a file on one machine and name that: "
        "image: /shared/NAME.sqsh",
    ),
    Cause(
        rf"{CODE}40[13]\b",
        "the registry {registry} does not let you have the image",
        "write `machine {registry} login USER password TOKEN` into ~/.config/enroot/.credentials on the nodes, or name "
        "the file of an image",
        final=True,
    ),
    Cause(
        rf"{CODE}404\b|Invalid image reference|Could not retrieve digest",
        "the registry {registry} has no such image",
        "mend image in the cluster file",
        final=True,
    ),
    Cause(
        r"curl: \(\d+\)|failed to import docker image",
        "the image could not be had from the registry {registry}",
        "build a file on a machine that reaches it, and name that: image: /shared/NAME.sqsh",
    ),
    Cause(
        r"Invalid image format|corruption detected|FATAL ERROR",
        "the image is damaged",
        "copy or build it again",
    ),
    Cause(
        r"Failed to mount|\bfuse(?:rmount3?)?\b|squashfuse|/dev/fuse",
        "the node cannot mount the image",
        "ask an administrator to install squashfuse and fuse-overlayfs there, with /dev/fuse",
        "container",
    ),
    Cause(
        r"No such file or directory|source path does not exist",
        "the node does not see a file that it needs",
        "look whether its shared disks are mounted",
        "mount",
    ),
    Cause(
        r"couldn't chdir",
        "the node does not see the Run's folder",
        "look whether its shared disks are mounted",
        "mount",
    ),
)


def container_failure(
    log: str, image: str, nodes: Sequence[str], *, fine_before: bool = False
) -> dict[str, object] | None:
    """Return verdict, reason and bad nodes where a step had no container; None where a log tells of no such thing.

    `nodes`: all of the attempt. The blame is not sure: what the others would have said is not known, for srun ends them
    all with the first. `fine_before`: an earlier attempt trained in this image.
    """
    if found := UNKNOWN_OPTION.search(log):
        reason = f"no Pyxis on {nodes[0]}: {found[0].strip()}; ask an administrator to load it there"
        # srun on the first node says it for all.
        blamed = blamed_nodes([Fault(nodes[0], "container")], nodes[:1], fine_before=fine_before)
        return {"verdict": ENVIRONMENT, "reason": reason, "nodes": blamed, "sure": False}
    said = [(match["node"] or nodes[0], match["text"].strip()) for match in SAID.finditer(log) if match["text"].strip()]
    if not said:
        return None
    cause, line = next(
        ((cause, text) for cause in CAUSES for _, text in reversed(said) if re.search(cause.pattern, text)),
        (None, said[0][1]),
    )
    speakers = list(dict.fromkeys(node for node, _ in said))
    place = ", ".join(speakers[:NAMED]) + (f" and {len(speakers) - NAMED} more" if len(speakers) > NAMED else "")
    line = line.removeprefix("[ERROR] ")[:LINE]
    if cause is None:
        return {"verdict": ENVIRONMENT, "reason": f"{place}: no container: {line}", "nodes": [], "sure": False}
    registry = image.partition("#")[0].rpartition("@")[2] if "#" in image else "that Enroot takes for names without one"
    told = f"{place}: {cause.cause}: {line}; {cause.remedy}".replace("{registry}", registry)
    blamed = blamed_nodes([Fault(node, cause.kind) for node in speakers], nodes, fine_before=fine_before)
    return {"verdict": "config" if cause.final else ENVIRONMENT, "reason": told, "nodes": blamed, "sure": False}
