"""Text of others for a terminal: what would move the cursor, fill the clipboard or hide a word is shown instead."""

from __future__ import annotations

import re

# C0 but for tab and line end, DEL, C1; marks that turn the direction of writing; halves of characters, which no
# terminal can be given.
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
PICTURES = 0x2400  # of C0, in its order: ESC is shown as ␛
DELETE = "\x7f"


def visible(text: str) -> str:
    """Return `text` with a picture in place of each character that a terminal would obey and not show."""
    return HIDDEN.sub(_picture, text)


def _picture(match: re.Match[str]) -> str:
    character = match[0]
    if character < " ":
        return chr(PICTURES + ord(character))
    return "\N{SYMBOL FOR DELETE}" if character == DELETE else "\N{REPLACEMENT CHARACTER}"


def visible_json(text: str) -> str:
    """Return JSON that means the same, with such characters written as \\uXXXX; other languages stay readable."""
    return HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
