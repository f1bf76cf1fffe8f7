"""Tables as data, and their two forms: Markdown for people, CSV for programs.

A value that does not exist is ``None``: it reads ``missing`` in Markdown and ``NA`` in CSV, never blank.
Markdown rounds, CSV keeps every digit.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MISSING = "missing"
MISSING_CSV = "NA"
NOT_APPLICABLE = "-"  # there is no such value, as the interval of a single seed


@dataclass(frozen=True)
class Column:
    """One column: key of its values, heading, digits after the point, whether plus signs are shown.

    Without ``digits`` a number is shown as it is. A ``probability`` too small for its digits reads
    ``<0.0001``, not zero.
    """

    key: str
    title: str
    digits: int | None = 4
    signed: bool = False
    probability: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of values under columns. ``name`` is the stem of its files."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...] = ()

    def text_rows(self) -> list[list[str]]:
        """Return the cells as shown, row by row."""
        return [[_cell(row.get(column.key), column) for column in self.columns] for row in self.rows]

    def numeric(self, column: Column) -> bool:
        """Whether every value of a column that exists is a number: such columns are aligned right."""
        values = [row.get(column.key) for row in self.rows]
        known = [value for value in values if value is not None and value != NOT_APPLICABLE]
        return bool(known) and all(
            isinstance(value, int | float) and not isinstance(value, bool) for value in known
        )


def _cell(value: Any, column: Column) -> str:
    if column.probability and isinstance(value, float) and column.digits is not None:
        least = 10.0**-column.digits
        if value < least:
            return f"<{least:.{column.digits}f}"
    return show(value, column.digits, column.signed)


def show(value: Any, digits: int | None = 4, signed: bool = False) -> str:
    """Return a value as a person reads it: rounded, thousands grouped, ``missing`` for ``None``."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    sign = "+" if signed else ""
    if isinstance(value, int):
        return f"{value:{sign},d}"
    if isinstance(value, float):
        return f"{value:{sign}}" if digits is None else f"{value:{sign},.{digits}f}"
    if isinstance(value, list | tuple):
        return ", ".join(show(item, digits) for item in value)
    return str(value)


def _escape(text: str) -> str:
    text = text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    return " ".join(text.split())


def markdown(table: Table, heading: bool = True) -> str:
    """Return the table as GitHub Markdown, with title and notes unless ``heading`` is false."""
    lines = [f"# {table.title}", ""] if heading else []
    if table.rows:
        lines.append("| " + " | ".join(_escape(column.title) for column in table.columns) + " |")
        marks = ["---:" if table.numeric(column) else "---" for column in table.columns]
        lines.append("| " + " | ".join(marks) + " |")
        lines += ["| " + " | ".join(map(_escape, row)) + " |" for row in table.text_rows()]
    else:
        lines.append("No rows.")
    if heading and table.notes:
        lines += ["", *(f"- {note}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def to_csv(table: Table) -> str:
    """Return the table as CSV with full precision, column keys as header and ``NA`` for what is missing."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([column.key for column in table.columns])
    for row in table.rows:
        writer.writerow([_csv_value(row.get(column.key)) for column in table.columns])
    return stream.getvalue()


def _csv_value(value: Any) -> str:
    if value is None:
        return MISSING_CSV
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "; ".join(_csv_value(item) for item in value)
    return str(value)
