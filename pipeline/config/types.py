"""The kinds of values that keys take, and the base of all sections."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

from pipeline.slurm.time_limits import canonical_time

MOST = 10**12  # bound of counts that have no narrower one: beyond it is a slip of the finger, not a wish
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
WHOLE_NUMBER = re.compile(r"[-+]?[0-9]{1,30}(_[0-9]{1,30}){0,9}")
REAL_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


class AsTyped:
    """Mark a field whose unquoted values are the text that a person typed: 08:00:00, 0123, 1-4, true."""


def broken_rule(text: str) -> PydanticCustomError:
    """Make the error of a value that breaks one of our rules; `text` follows the value: `is not …; write …`."""
    return PydanticCustomError("rule", "{text}", {"text": text})


def has_control_characters(text: str) -> bool:
    """Tell whether `text` holds control characters, or the half characters that Python makes of broken UTF-8."""
    return any(unicodedata.category(character) in ("Cc", "Cs") for character in text)


def _whole(value: object) -> object:
    """Accept 1e9 and the texts `1_000` and '1000' for a whole number: there is nothing else they could mean."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, str) and WHOLE_NUMBER.fullmatch(value):
        return int(value)
    return value


def _real(value: object) -> object:
    """Accept '3e-4' in quotes, which people write because other loaders need it."""
    if isinstance(value, str) and (REAL_NUMBER.fullmatch(value) or WHOLE_NUMBER.fullmatch(value)):
        return float(value)
    return value


def _time(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise broken_rule("is not a time limit; write for example 12:00:00, or a whole number of minutes")
    try:
        return canonical_time(str(value))
    except ValueError as error:
        raise broken_rule(str(error)) from None


def _time_or_none(value: object) -> object:
    return None if value is None else _time(value)


def _name(value: object) -> object:
    if isinstance(value, str) and not NAME.fullmatch(value):
        raise broken_rule(
            "is not a name; write 1 to 64 of the letters A-Z a-z, digits, '.', '_', '-', the first a letter or digit"
        )
    return value


def _line(value: object) -> object:
    """Refuse text that cannot be a path or a name: empty, or with control characters in it."""
    if isinstance(value, str) and not value.strip():
        raise broken_rule("is empty; write something, or remove the line")
    if isinstance(value, str) and has_control_characters(value):
        raise broken_rule("holds control characters or broken UTF-8; remove them")
    return value


def one_or_more(value: object) -> object:
    """Read `x` as `[x]`, and refuse an empty list."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and not value:
        raise broken_rule("is an empty list; write at least one item, or remove the line")
    return value


WHOLE, REAL = BeforeValidator(_whole), BeforeValidator(_real)
LINE, NAMED = BeforeValidator(_line), BeforeValidator(_name)
Time = Annotated[str, BeforeValidator(_time, json_schema_input_type=int | str)]
TIME_OR_NONE = BeforeValidator(_time_or_none, json_schema_input_type=int | str | None)


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values are never changed after loading.

    `other_names` are what people call keys elsewhere, with the dotted key that they then mean.
    """

    other_names: ClassVar[Mapping[str, str]] = {}
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False, defer_build=True
    )
