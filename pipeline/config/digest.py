"""Which values of a section go into a digest, so that old records stay valid when the schema gets a new key."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import BaseModel


def digest_values(section: BaseModel, always: Collection[str], leave_out: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of the keys `always`, whatever they are, and of all others that differ from their default.

    `always` are the keys that there were when the first digests were written: it never grows. A key that comes later
    changes no digest as long as it has its default, under which everything is as it was before there was the key.
    """
    values, defaults = section.model_dump(mode="json", exclude=set(leave_out)), default_values(type(section))
    return {key: value for key, value in values.items() if key in always or value != defaults.get(key)}


def default_values(section: type[BaseModel]) -> dict[str, Any]:
    """Return the default of each key that has one, as `model_dump(mode="json")` writes it."""
    defaults = {
        name: field.get_default(call_default_factory=True)
        for name, field in section.model_fields.items()
        if not field.is_required()
    }
    return section.model_construct(**defaults).model_dump(mode="json", include=set(defaults), warnings=False)
