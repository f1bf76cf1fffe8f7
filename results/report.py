"""From records to every table and figure: ``report(records_dir, out_dir)``.

A pure function of the records: no clock, no machine, no order of files enters, so that two reports of the
same records are the same bytes. The names of what was written are kept in ``generated.txt``; only files
named there by an earlier report are ever removed, and nothing that a person wrote is overwritten.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from results.bench_figures import bench_figure
from results.cells import Cell, group_cells
from results.effects import Effect, effects
from results.eval_pairing import EvalPair, pair_evaluations
from results.eval_record import EvalRecord
from results.evaluations import (
    documents_table,
    evaluation_effects_table,
    evaluations,
    evaluations_table,
)
from results.figures import effect_figure, loss_curves
from results.findings import bench_findings, effect_findings, evaluation_findings
from results.jsonio import write_whole
from results.metrics import metric as metric_facts
from results.names import bench_stem, effects_stem, slug, unique_slugs
from results.pairing import latest_runs, pair_records
from results.published import PAPER, Published, load_published, published_table
from results.readme import Content, page
from results.record import BenchRecord, Record, RunRecord
from results.store import load_records
from results.suites.pages import Page, has_records, suite_page
from results.suites.view import PROBE, SuiteView
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
    content = _write(writer, records, published, suites)
    writer.text("README.md", page(content, MARK))
    names = sorted({*writer.written, MANIFEST})
    for name in sorted(set(earlier) - set(names)):
        (root / name).unlink(missing_ok=True)
    write_whole(root / MANIFEST, "".join(f"{name}\n" for name in names).encode())
    return [root / name for name in names]


def _write(
    writer: _Writer, records: Sequence[Record], published: list[Published], suites: Sequence[SuiteView]
) -> Content:
    """Write every table and figure; return what the page is made of."""
    runs, _ = latest_runs(records)
    cells = group_cells(runs)
    found = effects(records)
    figures, curves = _draw_cells(writer, cells)
    by_task = _effects_by_task(found)
    _write_effects(writer, by_task)
    for task in sorted({record.task for record in runs}):
        writer.table(runs_table(task, [record for record in runs if record.task == task]))
    benches = _benches(records)
    for bench in benches:
        writer.table(bench_table(bench))
        writer.drawn(bench_figure(bench, writer.out_dir / bench_stem(bench)))
    evaluated = evaluations(records)
    pairs = pair_evaluations(evaluated)
    tables = _evaluation_tables(evaluated, pairs)
    pages = _suite_pages(writer, suites, records, curves)
    probes = _probes(records)
    in_figure = _hashes(suites, "probe")
    others = [probe for probe in probes if probe.config.get("config_hash") not in in_figure]
    told = _hashes(suites, "evaluation")
    for probe in others:
        writer.table(bench_table(probe))
    for table in tables:
        writer.table(table)
    if published:
        writer.table(published_table(published))
    writer.table(unfinished_table(runs))
    writer.table(unpaired_table(pair_records(records).refused))
    return Content(
        runs=runs,
        benches=benches,
        evaluations=len(evaluated),
        probed=len(probes),
        by_task=by_task,
        findings=[
            *(line for one in pages for line in one.findings),
            *effect_findings(by_task, _hashes(suites)),
            *evaluation_findings([pair for pair in pairs if pair.other.checkpoint.config_hash not in told]),
            *bench_findings(benches),
        ],
        figures=figures,
        pages=_suite_lines(pages),
        evaluated=tables,
        probes=others,
        published=bool(published),
        written=writer.written,
    )


def _hashes(suites: Sequence[SuiteView], kind: str | None = None) -> frozenset[str]:
    """Return the config hashes of all cells of suites, of one kind of view or of all."""
    return frozenset(cell.config_hash for view in suites if kind in (None, view.view) for cell in view.cells)


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
    """Return the benchmarks, ordered; statistics of models, kept in the same form, are none."""
    found = [record for record in records if isinstance(record, BenchRecord) and record.name != PROBE]
    return sorted(found, key=lambda record: record.run_id)


def _probes(records: Sequence[Record]) -> list[BenchRecord]:
    """Return the probed models, ordered."""
    found = [record for record in records if isinstance(record, BenchRecord) and record.name == PROBE]
    return sorted(found, key=lambda record: record.run_id)


def _effects_by_task(found: Sequence[Effect]) -> dict[tuple[str, str], list[Effect]]:
    groups: dict[tuple[str, str], list[Effect]] = defaultdict(list)
    for effect in found:
        groups[effect.cell.task, effect.metric].append(effect)
    return dict(sorted(groups.items()))


def _evaluation_tables(found: Sequence[EvalRecord], pairs: Sequence[EvalPair]) -> list[Table]:
    """Return the tables of downstream evaluations: effects first where there are pairs; none without any."""
    effects_and_documents = [evaluation_effects_table(pairs), documents_table(pairs)] if pairs else []
    return [*effects_and_documents, evaluations_table(found)] if found else []


def _suite_lines(pages: Sequence[Page]) -> list[str]:
    lines = [line for one in pages for line in one.lines]
    return ["## The paper's figures and tables", "", *lines] if lines else []


def _suite_pages(
    writer: _Writer, suites: Sequence[SuiteView], records: Sequence[Record], curves: Mapping[str, str]
) -> list[Page]:
    """Write every suite that has records; return their pages."""
    return [
        suite_page(view, records, writer.out_dir, writer.table, writer.drawn, curves)
        for view in sorted(suites, key=lambda view: view.stem)
        if has_records(view, records)
    ]


def _draw_cells(writer: _Writer, cells: Sequence[Cell]) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Draw the curves of every cell that has any.

    Returns (label, file stem below the folder) of each, and the stem by the config hash of every run.
    """
    names = unique_slugs({cell.key: cell.label for cell in cells})
    drawn: list[tuple[str, str]] = []
    stems: dict[str, str] = {}
    for cell in cells:
        curves = [record for record in cell.records if _has_curves(record)]
        if not curves:
            continue
        stem = f"figures/curves-{names[cell.key]}"
        writer.drawn(loss_curves(curves, writer.out_dir / stem, cell.label))
        drawn.append((cell.label, stem))
        stems |= {record.config_hash: stem for record in curves}
    return drawn, stems


def _has_curves(record: RunRecord) -> bool:
    train = record.curves.get("train")
    return record.status == "completed" and train is not None and "loss" in train and bool(train.step)


def _write_effects(writer: _Writer, by_task: dict[tuple[str, str], list[Effect]]) -> None:
    for (task, name), group in by_task.items():
        title = f"Effects: {task}, {metric_facts(name).title}"
        stem = effects_stem(task, name)
        writer.table(effects_table(stem, title, group))
        if any(effect.summary is not None for effect in group):
            writer.drawn(effect_figure(group, writer.out_dir / "figures" / stem, title))
