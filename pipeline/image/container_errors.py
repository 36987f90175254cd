"""Why a step had no container: what Pyxis and Enroot say in a job's log, as node, cause and remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.run.verdict import ENVIRONMENT

# slurmstepd-n1: error: pyxis:     [ERROR] No such file or directory: /images/train.sqsh
SAID = re.compile(r"^(?:\d+: )?slurmstepd(?:-(?P<node>\S+))?: error: pyxis: *(?P<text>.*)$", re.M)
UNKNOWN_OPTION = re.compile(r"^srun: (?:error: )?(?:unrecognized|unknown|invalid) option.*--container-.*$", re.M)


class Cause(NamedTuple):
    """`pattern` is what Enroot says. With `final` no other node would do better, so that the chain ends."""

    pattern: str
    cause: str
    remedy: str
    final: bool = False


CAUSES = (
    Cause(
        r"No space left on device|Disk quota exceeded|Not enough space",
        "Enroot has no room for the image",
        "free space in its folders (enroot.conf: ENROOT_DATA_PATH, ENROOT_CACHE_PATH, ENROOT_TEMP_PATH), or ask an "
        "administrator to have Pyxis mount images: use_squashfuse=1",
    ),
    Cause(
        r"(?:mkdir|cannot create|couldn't mkdir).*Permission denied|Permission denied.*(?:enroot|pyxis)",
        "Enroot may not make its folders",
        "ask an administrator to let users write to those of enroot.conf (ENROOT_RUNTIME_PATH, ENROOT_CACHE_PATH, "
        "ENROOT_DATA_PATH); a cache that several users share must be writable for each",
    ),
    Cause(
        r"returned error code: 40[13]",
        "the registry {registry} does not let you have the image",
        "write `machine {registry} login USER password TOKEN` into ~/.config/enroot/.credentials on the nodes, or name "
        "the file of an image",
        final=True,
    ),
    Cause(
        r"returned error code: 404|Invalid image reference|Could not retrieve digest",
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
        r"Invalid image format|corruption detected|FATAL ERROR|Failed to mount",
        "the image is damaged, or cannot be read on this node",
        "copy or build it again",
    ),
    Cause(
        r"No such file or directory|source path does not exist",
        "the node does not see a file that it needs",
        "look whether its shared disks are mounted",
    ),
    Cause(r"couldn't chdir", "the node does not see the Run's folder", "look whether its shared disks are mounted"),
)


def container_failure(log: str, image: str, nodes: Sequence[str]) -> dict[str, object] | None:
    """Return verdict, reason and bad nodes where a step had no container; None where a log tells of no such thing.

    `nodes`: all of the attempt. Where each of them says the same, none is worse than the others.
    """
    if found := UNKNOWN_OPTION.search(log):
        reason = f"no Pyxis on {nodes[0]}: {found[0].strip()}; ask an administrator to load it there"
        return {"verdict": ENVIRONMENT, "reason": reason, "nodes": list(nodes[:1]) if len(nodes) > 1 else []}
    said = [(match["node"] or nodes[0], match["text"].strip()) for match in SAID.finditer(log) if match["text"].strip()]
    if not said:
        return None
    cause, line = next(
        ((cause, text) for cause in CAUSES for _, text in reversed(said) if re.search(cause.pattern, text)),
        (None, said[0][1]),
    )
    blamed = list(dict.fromkeys(node for node, _ in said))
    place = ", ".join(blamed[:8]) + (f" and {len(blamed) - 8} more" if len(blamed) > 8 else "")
    if cause is None:
        return {"verdict": ENVIRONMENT, "reason": f"{place}: no container: {line}", "nodes": []}
    registry = image.partition("#")[0].rpartition("@")[2] if "#" in image else "that Enroot takes for names without one"
    told = f"{place}: {cause.cause}: {line.removeprefix('[ERROR] ')}; {cause.remedy}".replace("{registry}", registry)
    bad = blamed if len(blamed) < len(nodes) and not cause.final else []
    return {"verdict": "config" if cause.final else ENVIRONMENT, "reason": told, "nodes": bad}
