"""What general compressors need for a text: the line that a language model has to get under."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip -9": lambda text: gzip.compress(text, 9),
    "bzip2 -9": lambda text: bz2.compress(text, 9),
    "xz -9": lambda text: lzma.compress(text, preset=9),
}


def bits_per_byte(text: bytes) -> dict[str, float]:
    """Return compressed bits per byte of `text` by compressor. Their headers count: a file is what one would keep."""
    return {name: 8 * len(compress(text)) / len(text) for name, compress in COMPRESSORS.items()}
