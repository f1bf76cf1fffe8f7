"""The results page: what is known first, then the paper's figures and tables, then everything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from results.effects import Effect
from results.metrics import metric as metric_facts
from results.names import bench_stem, effects_stem, slug
from results.record import BenchRecord, RunRecord
from results.summaries import effects_table
from results.tables import Table, markdown

SHORT = ("cell", "arm", "difference", "low", "high", "seeds", "signs", "holm", "verdict")


@dataclass(frozen=True)
class Content:
    """What a page is made of.

    Attributes:
        findings: sentences for its opening.
        figures: label and file stem of curves.
        pages: the lines of all suites.
        evaluated: tables of downstream evaluations, the first one shown whole.
        probes: probed models that are in no suite.
        written: names of all files of the report.
    """

    runs: Sequence[RunRecord]
    benches: Sequence[BenchRecord]
    evaluations: int
    probed: int
    by_task: Mapping[tuple[str, str], Sequence[Effect]]
    findings: Sequence[str]
    figures: Sequence[tuple[str, str]]
    pages: Sequence[str]
    evaluated: Sequence[Table]
    probes: Sequence[BenchRecord]
    published: bool
    written: Sequence[str] = field(repr=False)


def page(content: Content, mark: str) -> str:
    """Return the page as Markdown, ``mark`` first."""
    lines = [mark, "# Results", "", _counts(content), ""]
    lines += _findings(content.findings)
    lines += content.pages
    lines += _effects(content)
    lines += ["## Curves", ""] if content.figures else []
    lines += [f"- [{label}]({stem}.svg)" for label, stem in content.figures]
    lines += [""] if content.figures else []
    lines += _evaluation_lines(content.evaluated)
    lines += ["## Benchmarks", ""] if content.benches else []
    lines += [line for bench in content.benches for line in _bench_lines(bench, content.written)]
    lines += [""] if lines[-1] else []
    if content.probes:
        lines += ["## Other probed models", ""]
        lines += [f"- [{probe.run_id}](tables/{slug(probe.run_id)}.md)" for probe in content.probes] + [""]
    if content.published:
        lines += ["## What others published", ""]
        lines += ["[Table](tables/published.md), with sources; not measured here.", ""]
    lines += ["## What is not here", ""]
    lines += [
        "- [runs that did not complete, with their reason](tables/unfinished.md)",
        "- [runs that are in no comparison, and why](tables/unpaired.md)",
    ]
    for task in sorted({record.task for record in content.runs}):
        lines.append(f"- [all runs of {task}](tables/{slug(f'runs-{task}')}.md)")
    return "\n".join(lines) + "\n"


def _counts(content: Content) -> str:
    completed = sum(record.status == "completed" for record in content.runs)
    parts = [
        _plural(completed, "completed training run"),
        f"{len(content.runs) - completed} that did not complete",
        _plural(len(content.benches), "benchmark record"),
    ]
    parts += [_plural(content.evaluations, "downstream evaluation")] if content.evaluations else []
    parts += [_plural(content.probed, "probed model")] if content.probed else []
    return (
        f"{', '.join(parts)}. Everything here is regenerated from them by `./xsa report`; an effect is the "
        "mean difference to plain attention (sa) over seeds, pair by pair."
    )


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _findings(findings: Sequence[str]) -> list[str]:
    if not findings:
        return []
    how = (
        "Better, worse: the 95% t interval over seeds leaves zero out; of places each alone after Holm's "
        "correction over the places of a suite or the cells of a task. A mean over places is taken seed by "
        "seed, so that seeds are what is repeated. No difference shown is not the same as no difference."
    )
    return ["## What is known, and how sure", "", *(f"- {line}" for line in findings), "", how, ""]


def _effects(content: Content) -> list[str]:
    lines = []
    for (task, name), group in content.by_task.items():
        stem = effects_stem(task, name)
        title = f"{task}: {metric_facts(name).title}"
        table = effects_table(stem, title, group)
        columns = tuple(column for column in table.columns if column.key in SHORT)
        short = Table(stem, title, columns, table.rows)
        lines += [f"## {title}", "", markdown(short, heading=False).rstrip("\n"), ""]
        lines += [f"All columns: [table](tables/{stem}.md), [CSV](tables/{stem}.csv).", ""]
        if any(effect.summary is not None for effect in group):
            lines += [f"![{title}](figures/{stem}.svg)", ""]
    return lines


def _bench_lines(bench: BenchRecord, written: Sequence[str]) -> list[str]:
    lines = [f"- [{bench.name}](tables/{slug(bench.run_id)}.md), {bench.environment.device_name}"]
    drawn = f"{bench_stem(bench)}.svg"
    return lines + (["", f"![{bench.name}]({drawn})", ""] if drawn in written else [])


def _evaluation_lines(evaluated: Sequence[Table]) -> list[str]:
    if not evaluated:
        return []
    first, *_ = evaluated
    shown = ["## Downstream evaluation", "", markdown(first, heading=False).rstrip("\n"), ""]
    notes = [f"- {note}" for note in first.notes]
    links = ", ".join(f"[{table.title}](tables/{slug(table.name)}.md)" for table in evaluated)
    return [*shown, *notes, "", f"Tables: {links}.", ""]
