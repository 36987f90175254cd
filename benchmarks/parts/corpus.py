"""Build the benchmark corpus, about 89 MB of documents, from documentation packages of Debian.

Prose, technical text, code in prose, and a dictionary, whose many rare words are a worst case for whatever remembers
words. Exact duplicates are left out and the documents shuffled by a fixed seed, so every build of the same packages is
the same file.
"""

from __future__ import annotations

import gzip
import html
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.parts.cache import CACHE

PACKAGES = ("anarchism", "debian-handbook", "dict-gcide", "linux-doc", "python3-doc")
DICTIONARY_BYTES = 4096
_LEFT_OUT = re.compile(r"<(script|style|head)\b.*?</\1>", re.DOTALL | re.IGNORECASE)
_TAG = re.compile(r"<[^>]*>")


def corpus() -> Path:
    """Return the corpus as JSON lines with the field `text`, made when it is not there."""
    path = CACHE / "corpus.jsonl"
    if not path.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        texts = list(dict.fromkeys(text for text in _texts(_unpack()) if text.strip()))
        random.Random(0).shuffle(texts)
        temporary = path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        temporary.rename(path)
        print(f"corpus: {len(texts):,} documents, {path.stat().st_size / 1e6:.1f} MB", file=sys.stderr)
    return path


def texts() -> list[str]:
    """Return the documents of the corpus."""
    with corpus().open(encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def _unpack() -> Path:
    """Download the packages, with what they stand for, and unpack them without installing."""
    folder = CACHE / "packages"
    folder.mkdir(exist_ok=True)
    for name in PACKAGES:
        real = name if name in ("anarchism", "debian-handbook", "dict-gcide") else _real(name)
        if not list(folder.glob(f"{real}_*.deb")):
            subprocess.run(["apt-get", "download", "-qq", real], cwd=folder, check=True)
    root = CACHE / "root"
    for package in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)
    return root


def _real(name: str) -> str:
    """Return the versioned package that `name` depends on, such as linux-doc-6.1."""
    done = subprocess.run(["apt-cache", "depends", name], check=True, capture_output=True, text=True)
    found = re.search(rf"Depends: ({name.split('-')[0]}\S*-doc\S*)", done.stdout)
    return found[1] if found else name


def _texts(root: Path) -> Iterator[str]:
    documentation = root / "usr/share/doc"
    for pattern in ("anarchism/html/*.html", "debian-handbook/html/en-US/*.html"):
        for path in sorted(documentation.glob(pattern)):
            yield _plain(path.read_text("utf-8", errors="replace"))
    for path in sorted(documentation.glob("linux-doc-*/Documentation/**/*.gz")):
        if path.name.endswith((".rst.gz", ".txt.gz")) and "translations" not in path.parts:
            yield gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace")
    for path in sorted(documentation.glob("python3*/html/_sources/**/*.txt")):
        yield path.read_text("utf-8", errors="replace")
    for path in sorted((root / "usr/share/dictd").glob("*.dict.dz")):
        yield from _entries(gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace"))


def _plain(page: str) -> str:
    return re.sub(r"\n{3,}", "\n\n", html.unescape(_TAG.sub("", _LEFT_OUT.sub("", page))))


def _entries(dictionary: str) -> Iterator[str]:
    """Cut a dictionary at blank lines into documents of about DICTIONARY_BYTES."""
    group: list[str] = []
    size = 0
    for entry in dictionary.split("\n\n"):
        group.append(entry)
        size += len(entry)
        if size >= DICTIONARY_BYTES:
            yield "\n\n".join(group)
            group, size = [], 0
    if group:
        yield "\n\n".join(group)
