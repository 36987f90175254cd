"""Questions made from the documentation that every Python carries: an example that needs no download.

Each asks how a sentence of the language reference goes on; the wrong choices are ends of other sentences.
"""

from __future__ import annotations

import random
import re
from typing import Any

MOST = 400  # questions
SENTENCE = re.compile(r"(?<=[.!?])\s+")
WORDS = range(10, 40)  # in a sentence that is asked about


def sentences() -> list[str]:
    """Return sentences of the language reference (pydoc's topics), in a fixed order."""
    from pydoc_data.topics import topics

    found = []
    for _, text in sorted(topics.items()):
        for paragraph in text.split("\n\n"):
            if paragraph.startswith((" ", ".", "*", "+", "|")):  # code, lists and tables
                continue
            for sentence in SENTENCE.split(" ".join(paragraph.split())):
                if len(sentence.split()) in WORDS and sentence[0].isupper() and sentence.endswith("."):
                    found.append(sentence)
    return list(dict.fromkeys(found))


def questions(count: int = MOST) -> list[dict[str, Any]]:
    """Return multiple-choice questions as records of context, choices and answer; the same for the same Python."""
    draw, halves = random.Random(0), []
    for sentence in sentences():
        words = sentence.split(" ")
        cut = len(words) * 2 // 3
        halves.append((" ".join(words[:cut]), " " + " ".join(words[cut:])))
    made = []
    for number in sorted(draw.sample(range(len(halves)), min(count, len(halves)))):
        context, right = halves[number]
        wrong = [halves[other][1] for other in draw.sample(range(len(halves)), 4) if other != number][:3]
        answer = draw.randrange(len(wrong) + 1)
        made.append({"context": context, "choices": [*wrong[:answer], right, *wrong[answer:]], "answer": answer})
    return made
