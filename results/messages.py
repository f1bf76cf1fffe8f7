"""What a failed validation says to a person: one line, with the nearest known key."""

from __future__ import annotations

import difflib

from pydantic import BaseModel, ValidationError


def one_line(error: ValidationError, model: type[BaseModel] | None = None) -> str:
    """Return the first problem of a pydantic error as ``place: what is wrong``, with the nearest key."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "record"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        known = list(model.model_fields) if model is not None and len(first["loc"]) == 1 else []
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "put fields of your own into 'extra'"
        message = f"unknown key; {hint}"
    elif first["type"] == "missing":
        message = "missing; every record of this kind has it"
    elif "input" in first and not isinstance(first["input"], dict | list):
        message = f"{message}, got {first['input']!r}"[:300]
    more = error.error_count() - 1
    return f"{place}: {message}" + (f" (and {more} more)" if more else "")
