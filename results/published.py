"""Numbers that others published, kept as data with their source and apart from everything measured here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from results.messages import one_line
from results.tables import Column, Table

PAPER = Path(__file__).parent / "paper"


class Published(BaseModel):
    """One published comparison. Values are as printed; ``None`` where the source does not give one."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    id: Annotated[str, Field(pattern=r"^[a-z0-9.-]+$")]
    quantity: str
    unit: str
    better: Literal["lower", "higher"]
    baseline: float | None
    xsa: float | None
    difference: float | None
    runs: Annotated[int, Field(ge=1)] | None
    controlled: bool | None
    setting: str
    work: Annotated[str, Field(min_length=1)]
    place: Annotated[str, Field(min_length=1)]
    read: Literal["first_hand", "second_hand"]
    note: str | None


def load_published(directory: str | Path = PAPER) -> list[Published]:
    """Return the entries of every ``*.yaml`` in ``directory``, in file order; none when it does not exist.

    Raises ``ValueError`` with one line that names the file and what is wrong, also for a repeated id.
    """
    entries: list[Published] = []
    for path in sorted(Path(directory).glob("*.yaml")):
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(data, list):
            raise ValueError(f"{path}: expected a list of entries, got {type(data).__name__}")
        for item in data:
            try:
                entry = Published.model_validate(item)
            except ValidationError as error:
                name = item.get("id", "an entry") if isinstance(item, dict) else "an entry"
                raise ValueError(f"{path}: {name}: {one_line(error, Published)}") from None
            if any(entry.id == other.id for other in entries):
                raise ValueError(f"{path}: {entry.id} stands there twice; give each entry its own id")
            entries.append(entry)
    return entries


def published_table(entries: list[Published]) -> Table:
    """Return published numbers as a table, with the difference as published or computed from both values."""
    rows = []
    for entry in entries:
        difference, origin = entry.difference, "published"
        if difference is None:
            # Nothing is published to more than six decimals; more digits would be noise of the subtraction.
            if entry.baseline is not None and entry.xsa is not None:
                difference = round(entry.xsa - entry.baseline, 6)
            origin = "computed here"
        rows.append(
            entry.model_dump()
            | {
                "change": difference,
                "origin": origin,
                "source": f"{entry.work}, {entry.place}",
                "read": entry.read.replace("_", " "),
                "controlled": "unknown" if entry.controlled is None else entry.controlled,
                "note": entry.note or "none",
            }
        )
    columns = (
        Column("quantity", "quantity"),
        Column("unit", "unit"),
        Column("baseline", "published baseline", None),
        Column("xsa", "published XSA", None),
        Column("change", "difference", None, signed=True),
        Column("origin", "difference is"),
        Column("runs", "runs each"),
        Column("controlled", "only XSA differs"),
        Column("setting", "setting"),
        Column("source", "source"),
        Column("read", "read"),
        Column("note", "note"),
    )
    notes = ("nothing in this table was measured by this project",)
    return Table("published", "Published numbers", columns, tuple(rows), notes)
