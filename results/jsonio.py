"""JSON text for records: exact, explicit and stable, and files that are written whole.

Three things the standard library leaves open are fixed here:

* floats are written with ``repr`` precision, so that reading gives back the same bits. JSON has no
  NaN or infinity; they are written as ``{"$float": "nan"}``, ``"inf"`` or ``"-inf"`` so that any JSON
  reader can open the file and no reader can mistake them for a number;
* keys come out in the order of the given mapping, lists of plain values stay on one line, so that the
  same record always gives the same bytes and a difference between two records is readable;
* a repeated key is an error, not a silent overwrite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xsa_core.files import whole

FLOAT_TAG = "$float"
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MAX_DEPTH = 64


def plain(value: Any, where: str = "", depth: int = 0) -> Any:
    """Return ``value`` made of ``dict``, ``list``, ``str``, ``int``, ``float``, ``bool`` and ``None`` only.

    Tuples become lists and the keys of every mapping are sorted, so that equal contents give equal text.
    Raises ``ValueError`` naming the place when something has no JSON form (an array, a path, a set ...).
    """
    place = where or "value"
    if depth > _MAX_DEPTH:
        raise ValueError(f"{place}: nested deeper than {_MAX_DEPTH} levels; store a flatter structure")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    # Subclasses (numpy.float64, IntEnum) are reduced to the plain type, so that a record read back compares
    # equal to the one written.
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(
                    f"{place}: key {key!r} is {type(key).__name__}, expected str; write str(key)"
                )
            if key == FLOAT_TAG:
                raise ValueError(f"{place}: the key {FLOAT_TAG!r} stands for NaN and infinity; rename it")
        return {
            key: plain(value[key], f"{where}.{key}" if where else key, depth + 1) for key in sorted(value)
        }
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise ValueError(
        f"{place}: {type(value).__name__} has no JSON form; convert it to str, int, float, bool, list or dict"
    )


def _scalar(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        name = "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
        return f'{{"{FLOAT_TAG}": "{name}"}}'
    return json.dumps(value, ensure_ascii=False)


def _render(value: Any, indent: str) -> str:
    inner = indent + "  "
    if isinstance(value, dict):
        if not value:
            return "{}"
        body = ",\n".join(f"{inner}{_scalar(key)}: {_render(item, inner)}" for key, item in value.items())
        return f"{{\n{body}\n{indent}}}"
    if isinstance(value, list):
        if not any(isinstance(item, dict | list) for item in value):
            return "[" + ", ".join(_scalar(item) for item in value) + "]"
        body = ",\n".join(f"{inner}{_render(item, inner)}" for item in value)
        return f"[\n{body}\n{indent}]"
    return _scalar(value)


def dumps(value: Any) -> str:
    """Return the JSON text of plain data (see :func:`plain`), keys in the order given, newline at the end."""
    return _render(value, "") + "\n"


def _unique(pairs: list[tuple[str, Any]]) -> Any:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [key for key, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated!r} stands twice in one object")
    if FLOAT_TAG in result:
        if len(result) == 1 and result[FLOAT_TAG] in _SPECIAL:
            return _SPECIAL[result[FLOAT_TAG]]
        raise ValueError(f"{FLOAT_TAG!r} must stand alone with one of {sorted(_SPECIAL)}")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f'the bare word {name} is not JSON; write {{"{FLOAT_TAG}": "nan"}} (or "inf", "-inf")')


def loads(text: str) -> Any:
    """Return the data of JSON text written by :func:`dumps`. Raises ``ValueError`` on anything else."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_whole(path: Path, content: bytes) -> Path:
    """Write ``content`` to ``path`` so that a reader sees the old file or all of the new one.

    Its directory is made if absent. Raises ``OSError``; after a failure the old file is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as temporary:
        temporary.write_bytes(content)
    return path
