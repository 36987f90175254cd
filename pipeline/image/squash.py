"""How the squashfs file is compressed."""

from __future__ import annotations

# Of nine ways that were measured (docs/containers.md): 425 MB, 8 CPU seconds to build, and 2.1 s from nothing to an
# imported torch, mount included. Enroot's own lzo -noD: 1,156 MB, 47 and 1.9 s; gzip 1: 471 MB, 15 and 3.0 s.
SQUASH = ["-comp", "zstd", "-Xcompression-level", "3"]
