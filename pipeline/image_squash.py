"""How the squashfs file is compressed."""

from __future__ import annotations

# Of nine ways that were measured (docs/containers.md) the smallest of those that start fastest: `import torch` from a
# mounted image that nothing of is cached takes 2.1 s and 425 MB; Enroot's lzo -noD 1.9 s and 1,156 MB, gzip 3.0 s.
SQUASH = ["-comp", "zstd", "-Xcompression-level", "3"]
