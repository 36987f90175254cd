"""How the squashfs file is compressed."""

from __future__ import annotations

SQUASH = ["-comp", "zstd", "-Xcompression-level", "1"]
