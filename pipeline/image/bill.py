"""The bill of an image: what packages it holds, in CycloneDX's form, which scanners for known holes read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote


def bill_path(image: Path) -> Path:
    """Name the bill, which lies beside its image."""
    return image.with_suffix(".cdx.json")


def make_bill(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the CycloneDX 1.5 document of an image by its record: what the image itself says that it holds."""
    found = record["smoke"]
    listed = [
        _component("pypi", re.sub(r"[-_.]+", "-", name).lower(), v) for name, v in found["python_packages"].items()
    ]
    listed += [_component("deb/debian", name, version) for name, version in found["debian_packages"].items()]
    image = {
        "type": "container",
        "bom-ref": record["image"],
        "name": record["image"],
        "hashes": [{"alg": "SHA-256", "content": record["sha256"]}],
    }
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": image},
        "components": sorted(listed, key=lambda component: str(component["purl"])),
    }


def _component(kind: str, name: str, version: str) -> dict[str, str]:
    purl = f"pkg:{kind}/{quote(name)}@{quote(version, safe='')}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
