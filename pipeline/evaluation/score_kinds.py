"""From the numbers of batches and questions to a Score with its standard error.

Sums are exactly rounded (fsum), so that they are the same in any order and by any Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pipeline.run.records import Record

Values = dict[str, list[float]]  # name -> numbers, in the order of batches
LOWER_IS_BETTER = frozenset({"bits/byte", "nats/token"})


def bits_per_byte(values: Values, about: Record) -> Record:
    """Return bits per byte of a text from "nll" (nats) and "tokens" of each batch, and `about["bytes"]`.

    The error takes batches for the sample: each is text from end to end, whose tokens go together.
    """
    nll, tokens, size = math.fsum(values["nll"]), int(sum(values["tokens"])), int(about["bytes"])
    residuals = [loss - nll / tokens * count for loss, count in zip(values["nll"], values["tokens"], strict=True)]
    return {
        "score": nll / math.log(2) / size,
        "unit": "bits/byte",
        "error": _error_of_sum(residuals) / math.log(2) / size,
        "nll": nll,
        "tokens": tokens,
        "nll_per_token": nll / tokens,
        "perplexity_per_token": math.exp(nll / tokens),
        "perplexity_per_byte": math.exp(nll / size),
    }


def multiple_choice(values: Values, about: Record) -> Record:
    """Return the share of questions whose right choice is the likeliest per byte ("normalised"), or as a whole."""
    return _share(values["right_normalised"]) | {"accuracy_unnormalised": _share(values["right"])["score"]}


def cloze(values: Values, about: Record) -> Record:
    """Return the share of targets that greedy decoding would write, and their bits per byte."""
    bits = math.fsum(values["nll"]) / math.log(2) / sum(values["bytes"])
    return _share(values["right"]) | {"target_bits_per_byte": bits}


def lm_eval(values: Values, about: Record) -> Record:
    """Return what lm-evaluation-harness has computed for a task."""
    (metric,), error = values.keys() - {"error"}, values["error"][0]
    unit = "bits/byte" if metric == "bits_per_byte" else "share"
    return {"score": values[metric][0], "unit": unit, "metric": metric, "error": error if error >= 0 else None}


SCORES: dict[str, Callable[[Values, Record], Record]] = {
    "bits_per_byte": bits_per_byte,
    "multiple_choice": multiple_choice,
    "cloze": cloze,
    "lm_eval": lm_eval,
}


def _share(right: Sequence[float]) -> Record:
    """Return the mean of zeros and ones with its standard error."""
    count = len(right)
    share = sum(right) / count
    error = math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None
    return {"score": share, "unit": "share", "error": error, "questions": count}


def _error_of_sum(residuals: Sequence[float]) -> float:
    """Return the standard error of a sum of independent terms, from how far each is from what was expected of it."""
    count = len(residuals)
    return math.sqrt(count / (count - 1) * math.fsum(r * r for r in residuals)) if count > 1 else 0.0
