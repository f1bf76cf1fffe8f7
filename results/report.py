"""From records to every table and figure: ``report(records_dir, out_dir)``.

A pure function of the records: no clock, no machine, no order of files enters, so that two reports of the
same records are the same bytes. The names of what was written are kept in ``generated.txt``; only files
named there by an earlier report are ever removed, and nothing that a person wrote is overwritten.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from results.bench_figures import bench_figure
from results.cells import Cell, group_cells
from results.effects import Effect, effects
from results.eval_pairing import pair_evaluations
from results.evaluations import (
    documents_table,
    evaluation_effects_table,
    evaluations,
    evaluations_table,
)
from results.figures import effect_figure, loss_curves
from results.jsonio import write_whole
from results.metrics import metric as metric_facts
from results.pairing import latest_runs, pair_records
from results.published import PAPER, load_published, published_table
from results.record import BenchRecord, Record, RunRecord
from results.store import load_records
from results.suites.pages import has_records, suite_page
from results.suites.view import SuiteView
from results.summaries import (
    bench_table,
    effects_table,
    runs_table,
    unfinished_table,
    unpaired_table,
)
from results.tables import Table, markdown, to_csv

MARK = "<!-- Generated from the records by ./xsa report. Do not edit: the next report replaces it. -->"
MANIFEST = "generated.txt"
FOLDERS = ("tables", "figures")


def slug(text: str) -> str:
    """Return a file name for a label: letters, digits, dots and dashes, never empty, cut where too long."""
    name = re.sub(r"[^A-Za-z0-9.=]+", "-", text).strip("-.") or "unnamed"
    if len(name) > 80:
        name = f"{name[:71]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return name


def _unique(names: dict[str, str]) -> dict[str, str]:
    """Return a slug per key, with a piece of the key's hash where two labels give the same file name."""
    slugs = {key: slug(label) for key, label in names.items()}
    lowered = [name.lower() for name in slugs.values()]
    return {
        key: name
        if lowered.count(name.lower()) == 1
        else f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
        for key, name in slugs.items()
    }


class _Writer:
    """Writes files below one folder and remembers their names."""

    def __init__(self, out_dir: Path) -> None:
        self.out_dir = out_dir
        self.written: list[str] = []

    def text(self, name: str, content: str) -> None:
        write_whole(self.out_dir / name, content.encode("utf-8"))
        self.written.append(name)

    def table(self, table: Table) -> None:
        stem = f"tables/{slug(table.name)}"
        self.text(f"{stem}.md", f"{MARK}\n{markdown(table)}")
        self.text(f"{stem}.csv", to_csv(table))

    def drawn(self, paths: Sequence[Path]) -> None:
        self.written += [path.relative_to(self.out_dir).as_posix() for path in paths]


def report(
    records_dir: str | Path,
    out_dir: str | Path,
    paper_dir: str | Path = PAPER,
    suites: Sequence[SuiteView] = (),
) -> list[Path]:
    """Write tables, figures and ``README.md`` of all records into ``out_dir``; return the paths, sorted.

    ``suites`` are those whose tables and figures are wanted; one without any record is left out.
    Files of an earlier report that no longer belong are removed. Raises ``ValueError`` when a record cannot
    be read (nothing is written then) or when a ``README.md`` written by hand stands in the way.
    """
    root = Path(out_dir)
    records = load_records(records_dir)
    published = load_published(paper_dir)
    readme = root / "README.md"
    if readme.exists() and MARK not in readme.read_text(encoding="utf-8", errors="replace")[:500]:
        raise ValueError(f"{readme}: written by hand, a report would replace it; give another folder")
    earlier = _manifest(root)
    writer = _Writer(root)
    runs, _ = latest_runs(records)
    cells = group_cells(runs)
    found = effects(records)
    figures = _draw_cells(writer, cells)
    by_task = _effects_by_task(found)
    _write_effects(writer, by_task)
    for task in sorted({record.task for record in runs}):
        writer.table(runs_table(task, [record for record in runs if record.task == task]))
    for bench in _benches(records):
        writer.table(bench_table(bench))
        writer.drawn(bench_figure(bench, writer.out_dir / bench_stem(bench)))
    evaluated = _evaluation_tables(records)
    for table in evaluated:
        writer.table(table)
    pages = _suite_lines(writer, suites, records)
    if published:
        writer.table(published_table(published))
    writer.table(unfinished_table(runs))
    writer.table(unpaired_table(pair_records(records).refused))
    page = _readme(records, runs, by_task, figures, evaluated, pages, bool(published), writer.written)
    writer.text("README.md", page)
    names = sorted({*writer.written, MANIFEST})
    for name in sorted(set(earlier) - set(names)):
        (root / name).unlink(missing_ok=True)
    write_whole(root / MANIFEST, "".join(f"{name}\n" for name in names).encode())
    return [root / name for name in names]


def _manifest(root: Path) -> list[str]:
    """Return what an earlier report wrote; names outside the two generated folders are never touched."""
    path = root / MANIFEST
    if not path.exists():
        return []
    names = path.read_text(encoding="utf-8").splitlines()
    return [
        name
        for name in names
        if name.count("/") == 1
        and name.split("/")[0] in FOLDERS
        and name.split("/")[1] not in ("", ".", "..")
    ]


def _benches(records: Sequence[Record]) -> list[BenchRecord]:
    return sorted(
        (record for record in records if isinstance(record, BenchRecord)), key=lambda record: record.run_id
    )


def _effects_by_task(found: Sequence[Effect]) -> dict[tuple[str, str], list[Effect]]:
    groups: dict[tuple[str, str], list[Effect]] = defaultdict(list)
    for effect in found:
        groups[effect.cell.task, effect.metric].append(effect)
    return dict(sorted(groups.items()))


def bench_stem(bench: BenchRecord) -> str:
    """Return the stem of a benchmark's figure, below the report's folder."""
    return f"figures/{slug(bench.run_id)}"


def _bench_lines(bench: BenchRecord, written: Sequence[str]) -> list[str]:
    lines = [f"- [{bench.name}](tables/{slug(bench.run_id)}.md), {bench.environment.device_name}"]
    drawn = f"{bench_stem(bench)}.svg"
    return lines + (["", f"![{bench.name}]({drawn})", ""] if drawn in written else [])


def _evaluation_tables(records: Sequence[Record]) -> list[Table]:
    """Return the tables of downstream evaluations: effects first where there are pairs; none without any."""
    found = evaluations(records)
    pairs = pair_evaluations(found)
    effects_and_documents = [evaluation_effects_table(pairs), documents_table(pairs)] if pairs else []
    return [*effects_and_documents, evaluations_table(found)] if found else []


def _counted(records: Sequence[Record]) -> str:
    count = len(evaluations(records))
    return f", {count} downstream evaluations" if count else ""


def _evaluation_lines(evaluated: Sequence[Table]) -> list[str]:
    if not evaluated:
        return []
    first, *_ = evaluated
    shown = ["## Downstream evaluation", "", markdown(first, heading=False).rstrip("\n"), ""]
    links = ", ".join(f"[{table.title}](tables/{slug(table.name)}.md)" for table in evaluated)
    return [*shown, f"Tables: {links}.", ""]


def _suite_lines(writer: _Writer, suites: Sequence[SuiteView], records: Sequence[Record]) -> list[str]:
    """Write every suite that has records; return their lines on the page."""
    lines: list[str] = []
    for view in sorted(suites, key=lambda view: view.stem):
        if has_records(view, records):
            lines += suite_page(view, records, writer.out_dir, writer.table, writer.drawn)
    return ["## The paper's figures and tables", "", *lines] if lines else []


def _draw_cells(writer: _Writer, cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """Draw the curves of every cell that has any; return (label, file stem below the folder)."""
    names = _unique({cell.key: cell.label for cell in cells})
    drawn: list[tuple[str, str]] = []
    for cell in cells:
        curves = [record for record in cell.records if _has_curves(record)]
        if not curves:
            continue
        stem = f"figures/curves-{names[cell.key]}"
        writer.drawn(loss_curves(curves, writer.out_dir / stem, cell.label))
        drawn.append((cell.label, stem))
    return drawn


def _has_curves(record: RunRecord) -> bool:
    train = record.curves.get("train")
    return record.status == "completed" and train is not None and "loss" in train and bool(train.step)


def _write_effects(writer: _Writer, by_task: dict[tuple[str, str], list[Effect]]) -> None:
    for (task, name), group in by_task.items():
        title = f"Effects: {task}, {metric_facts(name).title}"
        stem = slug(f"effects-{task}-{name.removeprefix('validation_')}")
        writer.table(effects_table(stem, title, group))
        if any(effect.summary is not None for effect in group):
            writer.drawn(effect_figure(group, writer.out_dir / "figures" / stem, title))


def _readme(
    records: Sequence[Record],
    runs: Sequence[RunRecord],
    by_task: dict[tuple[str, str], list[Effect]],
    figures: Sequence[tuple[str, str]],
    evaluated: Sequence[Table],
    pages: Sequence[str],
    published: bool,
    written: Sequence[str],
) -> str:
    lines = [MARK, "# Results", ""]
    completed = sum(record.status == "completed" for record in runs)
    benches = _benches(records)
    lines += [
        f"{completed} completed training runs, {len(runs) - completed} that did not complete, "
        f"{len(benches)} benchmark records{_counted(records)}. "
        "Everything here is regenerated from them by `./xsa report`; "
        "an effect is the mean difference to plain attention (sa) over seeds, pair by pair.",
        "",
    ]
    for (task, name), group in by_task.items():
        stem = slug(f"effects-{task}-{name.removeprefix('validation_')}")
        title = f"{task}: {metric_facts(name).title}"
        table = effects_table(stem, title, group)
        wanted = ("cell", "arm", "difference", "low", "high", "seeds", "signs", "holm", "verdict")
        short = Table(
            stem, title, tuple(column for column in table.columns if column.key in wanted), table.rows
        )
        lines += [f"## {title}", "", markdown(short, heading=False).rstrip("\n"), ""]
        lines += [f"All columns: [table](tables/{stem}.md), [CSV](tables/{stem}.csv).", ""]
        if any(effect.summary is not None for effect in group):
            lines += [f"![{title}](figures/{stem}.svg)", ""]
    lines += pages
    lines += ["## Curves", ""] if figures else []
    lines += [f"- [{label}]({stem}.svg)" for label, stem in figures] + ([""] if figures else [])
    lines += _evaluation_lines(evaluated)
    lines += ["## Benchmarks", ""] if benches else []
    lines += [line for bench in benches for line in _bench_lines(bench, written)]
    lines += [""] if benches else []
    if published:
        lines += [
            "## What others published",
            "",
            "[Table](tables/published.md), with sources; not measured here.",
            "",
        ]
    lines += ["## What is not here", ""]
    lines += [
        "- [runs that did not complete, with their reason](tables/unfinished.md)",
        "- [runs that are in no comparison, and why](tables/unpaired.md)",
    ]
    for task in sorted({record.task for record in runs}):
        lines.append(f"- [all runs of {task}](tables/{slug(f'runs-{task}')}.md)")
    return "\n".join(lines) + "\n"
