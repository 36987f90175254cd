"""References to images, read by Docker's rules and written as Pyxis and Enroot want them. Pure but for `require`.

Docker takes the part before the first slash for a registry where it holds a dot or a colon or is `localhost`. Enroot
wants a `#` after it, and looks on Docker's own registry for whatever has none.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pipeline.config.types import has_control_characters
from pipeline.errors import NotReadyError, UserError
from pipeline.hints import command

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
SQUASHFS = (".sqsh", ".squashfs", ".sqfs")
# The grammar of Docker's `reference`: parts of lower-case words with ., _, __ or dashes between them.
PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
REPOSITORY = re.compile(rf"{PART}(?:/{PART})*")
REGISTRY = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]{1,5})?")
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
USER = re.compile(r"[^@#/\s]+")
DOCKERS_OWN = frozenset({"docker.io", "index.docker.io", "registry-1.docker.io"})
EXAMPLE = "write for example images/mine.sqsh, ubuntu:24.04 or registry.example.org/team/train:v1"


@dataclass(frozen=True)
class ImageReference:
    """Where an image is: a file, a registry, or the store of an engine on this machine (docker or podman)."""

    kind: Literal["file", "registry", "engine"]
    repository: str = ""
    registry: str = ""
    tag: str = ""
    digest: str = ""
    user: str = ""
    engine: Literal["", "dockerd", "podman"] = ""
    path: Path = Path()

    def pyxis(self) -> str:
        """Return the value of srun's --container-image; UserError for an engine's image, which nodes cannot see."""
        if self.kind == "engine":
            raise UserError(
                f"{self.enroot()}: the nodes do not see images of an engine of this machine, and Pyxis takes none; "
                f"make a file of it: enroot import -o NAME.sqsh {self.enroot()}; or build one: {command('image')}"
            )
        return str(self.path) if self.kind == "file" else self._written()

    def enroot(self) -> str:
        """Return what `enroot import` takes, or the path of a file, which needs no import."""
        if self.kind == "file":
            return str(self.path)
        if self.kind == "engine":
            registry = f"{self.registry}/" if self.registry else ""
            return f"{self.engine}://{registry}{self.repository}{f':{self.tag}' if self.tag else ''}"
        return f"docker://{self._written()}"

    def _written(self) -> str:
        user = f"{self.user}@" if self.user else ""
        registry = f"{self.registry}#" if self.registry else ""
        # A digest follows a colon: before an @ Enroot looks for the name of a user. It goes before a tag, as in Docker.
        version = self.digest or self.tag
        return f"{user}{registry}{self.repository}{f':{version}' if version else ''}"


def parse_image(text: str, folder: Path) -> ImageReference:
    """Read a reference; a relative path begins at `folder`. ValueError with what is wrong, to follow the value."""
    if not text.strip():
        raise ValueError(f"is empty; {EXAMPLE}")
    if has_control_characters(text):
        raise ValueError("holds control characters or broken UTF-8; remove them")
    if scheme := SCHEME.match(text):
        return _with_scheme(scheme[1], text[scheme.end() :])
    if _is_path(text):
        # Not resolved: where links lead is for the nodes to say.
        return ImageReference("file", path=Path(os.path.normpath(folder / Path(text).expanduser())))
    return _registry_image(text)


def require(reference: ImageReference) -> None:
    """Refuse the path of a file that is not there or is no squashfs file; NotReadyError names it."""
    if reference.kind != "file":
        return
    try:
        with reference.path.open("rb") as file:
            start = file.read(4)
    except IsADirectoryError:
        raise UserError(f"{reference.path}: this is a folder, and an image is one .sqsh file; name that") from None
    except OSError as error:
        raise NotReadyError(
            f"{reference.path}: no image can be read there: {error.strerror or error}; "
            f"to have one built: {command('image')}"
        ) from None
    if start != b"hsqs":
        raise UserError(
            f"{reference.path}: this is no squashfs file, or only the first part of one; build or copy it again"
        )


def _is_path(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~/")) or text.lower().endswith(SQUASHFS)


def _with_scheme(scheme: str, rest: str) -> ImageReference:
    if scheme == "docker":
        return _registry_image(rest)
    if scheme == "dockerd" or scheme == "podman":
        found = _registry_image(rest)
        if found.user or found.digest:
            raise ValueError(f"names a user or a digest, which Enroot does not take after {scheme}://; write NAME:TAG")
        return replace(found, kind="engine", engine="dockerd" if scheme == "dockerd" else "podman")
    raise ValueError(f"begins with {scheme}://, which is none of docker://, dockerd:// and podman://; {EXAMPLE}")


def _registry_image(text: str) -> ImageReference:
    """Read [USER@][REGISTRY/]REPOSITORY[:TAG][@DIGEST], with Enroot's `#` in place of the first slash too."""
    registry, mark, rest = text.rpartition("#")
    user = ""
    if mark:
        if "@" in registry:
            user, _, registry = registry.rpartition("@")
    else:
        first, slash, others = text.partition("/")
        if slash and "@" in first and ("." in first or ":" in first):
            user, _, first = first.rpartition("@")
        looks_like_registry = "." in first or ":" in first or first == "localhost"
        registry, rest = (first, others) if slash and looks_like_registry else ("", text)
    if (user and not USER.fullmatch(user)) or (mark and not registry):
        raise ValueError(f"has no registry before the #; {EXAMPLE}")
    if registry and not REGISTRY.fullmatch(registry):
        raise ValueError(f"has a registry, {registry}, that is no host name; {EXAMPLE}")
    rest, at, digest = rest.partition("@")
    if at and not DIGEST.fullmatch(digest):
        raise ValueError("has a digest that is none; write @sha256: and 64 of the digits 0-9 and a-f")
    if not at and (found := re.search(r":(sha256:[0-9a-f]{64})$", rest)):  # Enroot's way to write a digest
        rest, digest = rest[: found.start()], found[1]
    repository, colon, tag = rest.partition(":")
    if colon and not TAG.fullmatch(tag):
        raise ValueError(
            f"has a tag that is none; write 1 to 128 letters, digits, _, . and - after the colon; {EXAMPLE}"
        )
    if repository != (lower := repository.lower()):
        raise ValueError(f"has upper-case letters in {repository}, and names of images have none; write {lower}")
    if not REPOSITORY.fullmatch(repository):
        raise ValueError(f"is not the name of an image; {EXAMPLE}")
    if len(repository) > 255:
        raise ValueError("is longer than the 255 characters that the name of an image may have")
    return ImageReference("registry", repository, "" if registry in DOCKERS_OWN else registry, tag, digest, user)
