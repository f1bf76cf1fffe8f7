"""Evaluations are kept document by document, paired only where they may be, and shown with their tests."""

import hashlib
import random
from collections.abc import Callable, Sequence
from math import comb
from pathlib import Path
from typing import Any

import pytest

from results.eval_pairing import cell_key, pair_evaluations
from results.eval_record import EvalRecord, pack_bits, unpack_bits
from results.evaluations import documents_table, evaluation_effects_table, evaluations_table, score_table
from results.record import parse_record, to_plain
from results.report import report
from results.store import read_record, write_record
from results.suites.tables import task_table
from results.suites.view import (
    CellView,
    SuiteView,
    points,
    suite_evaluations,
    suite_runs,
    suite_values,
)
from results.tables import markdown

MOMENT = "2024-01-02T03:04:05.000000+00:00"


def made_up_evaluation(
    environment: dict[str, Any],
    variant: str = "sa",
    seed: int = 0,
    correct: dict[str, Sequence[bool]] | None = None,
    checkpoint: dict[str, Any] | None = None,
    **changes: Any,
) -> EvalRecord:
    """Return an evaluation whose tasks were answered as `correct` says."""
    correct = correct or {"piqa": [True, False, True, True], "boolq": [False, False, True, True]}
    tasks = {
        name: {
            "rows": len(right),
            "rows_available": 100,
            "primary_metric": "acc",
            "metrics": {"acc": sum(right) / len(right), "perplexity": 12.5},
            "stderr": {"acc": 0.1, "perplexity": None},
            "items": {"acc": pack_bits(right)},
            "documents_sha256": hashlib.sha256(f"{name} {len(right)}".encode()).hexdigest(),
            "requests": 2 * len(right),
        }
        for name, right in correct.items()
    }
    facts = {
        "weights_sha256": hashlib.sha256(f"{variant} {seed} {checkpoint}".encode()).hexdigest(),
        "run_id": f"text-quick_{variant}_s{seed}",
        "experiment": "text/quick",
        "variant": variant,
        "attention": {"variant": variant, "strength": 1.0, "layers": "all"},
        "optimizer": "adamw",
        "seed": seed,
        "step": 100,
        "config_hash": f"config {variant} {seed}",
        "pair_hash": f"pair {seed}",
        "cell_hash": "cell",
        "data_fingerprint": "data",
        "tokenizer": "bytes",
        "vocab_size": 256,
        "max_seq_len": 256,
        "parameters": 1000,
    }
    fields = {
        "name": "paper8",
        "harness_version": "0.4.13",
        "limit": 4,
        "checkpoint": facts | (checkpoint or {}),
        "tasks": tasks,
        "environment": environment,
        "seconds": 1.5,
        "started_at": MOMENT,
        "finished_at": MOMENT,
    }
    return EvalRecord.model_validate(fields | changes)


@pytest.fixture
def make(make_run: Callable[..., Any]) -> Callable[..., EvalRecord]:
    """Return the maker of evaluations on the made-up machine of the other records."""
    environment = make_run().environment.model_dump()

    def build(*arguments: Any, **changes: Any) -> EvalRecord:
        return made_up_evaluation(changes.pop("environment", environment), *arguments, **changes)

    return build


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 64, 1001])
def test_bits_come_back_as_they_were(count: int) -> None:
    bits = [random.Random(count).random() < 0.5 for _ in range(count)]
    digits = pack_bits(bits)
    assert len(digits) == (count + 3) // 4
    assert unpack_bits(digits, count) == bits
    assert digits == "".join(
        f"{int(''.join(map(str, map(int, (bits + [False] * 3)[i : i + 4]))), 2):x}"
        for i in range(0, count, 4)
    )


def test_bits_that_do_not_fit_are_refused() -> None:
    for digits, count in (("f", 3), ("ff", 4), ("", 1), ("G", 4), ("F", 4)):
        with pytest.raises(ValueError, match="values"):
            unpack_bits(digits, count)


def test_an_evaluation_comes_back_from_disk_as_it_was(make: Any, tmp_path: Path) -> None:
    record = make()
    assert read_record(write_record(record, tmp_path)) == record
    assert parse_record(to_plain(record)) == record


def test_models_and_limits_have_records_of_their_own(make: Any) -> None:
    ids = [
        make().run_id,
        make("xsa").run_id,
        make(seed=1).run_id,
        make(limit=None).run_id,
        make(name="other").run_id,
    ]
    assert len(set(ids)) == len(ids)
    assert make().run_id == ids[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["tasks"]["piqa"].update(primary_metric="f1"), "primary_metric 'f1' is not among"),
        (lambda d: d["tasks"]["piqa"]["metrics"].update(acc=0.5), "3 of 4 are right"),
        (lambda d: d["tasks"]["piqa"].update(rows=101), "hexadecimal digits|of 100 available"),
        (lambda d: d["tasks"]["piqa"]["items"].update(acc="zz"), "hexadecimal digits"),
        (lambda d: d.update(tasks={}), "no tasks"),
        (lambda d: d["checkpoint"].update(extra_key=1), "unknown key"),
        (lambda d: d["checkpoint"].pop("weights_sha256"), "missing"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused_in_one_line(
    change: Callable[[dict[str, Any]], Any], message: str, make: Any
) -> None:
    data = to_plain(make())
    change(data)
    with pytest.raises(ValueError, match=message) as caught:
        parse_record(data)
    assert "\n" not in str(caught.value)


def test_only_evaluations_that_differ_in_attention_alone_are_paired(make: Any) -> None:
    sa, xsa = make(), make("xsa")
    (pair,) = pair_evaluations([xsa, sa])
    assert (pair.baseline, pair.other) == (sa, xsa)
    alone = [
        make("xsa", seed=1),
        make("xsa", checkpoint={"step": 200}),
        make("xsa", checkpoint={"pair_hash": "another"}),
        make("xsa", checkpoint={"data_fingerprint": "other data"}),
        make("xsa", checkpoint={"tokenizer": "gpt2"}),
        make("xsa", limit=None),
        make("xsa", harness_version="0.5.0"),
        make("xsa", checkpoint={"pair_hash": None}),
        make("xsa", environment=xsa.environment.model_dump() | {"precision": "bfloat16"}),
        make("xsa", correct={"piqa": [True] * 5}),  # other documents
    ]
    for record in alone:
        assert pair_evaluations([sa, record]) == [], record.run_id


def test_documents_that_only_one_is_right_about_are_counted_and_tested_exactly(make: Any) -> None:
    before = [True] * 3 + [False] * 9 + [True] * 8
    after = [False] * 3 + [True] * 9 + [True] * 8
    pairs = pair_evaluations([make(correct={"piqa": before}), make("xsa", correct={"piqa": after})])
    (row,) = documents_table(pairs).rows
    assert (row["lost"], row["won"], row["rows"]) == (3, 9, 20)
    # Two-sided binomial test of 3 among 12, written out.
    assert row["p"] == pytest.approx(2 * sum(comb(12, k) for k in range(4)) / 2**12)
    assert row["difference"] == pytest.approx(6 / 20)


def test_effects_are_means_over_seeds_with_their_average_over_tasks(make: Any) -> None:
    records = []
    for seed, gain in enumerate((1, 2, 0)):
        records += [
            make(seed=seed, correct={"piqa": [False] * 10, "boolq": [True] * 10}),
            make(
                "xsa",
                seed=seed,
                correct={"piqa": [True] * gain + [False] * (10 - gain), "boolq": [True] * 10},
            ),
        ]
    rows = {row["task"]: row for row in evaluation_effects_table(pair_evaluations(records)).rows}
    assert rows["piqa"]["seeds"] == 3
    assert rows["piqa"]["difference"] == pytest.approx(0.1)
    # Half width of the 95% t interval of (0.1, 0.2, 0): 4.3027 x 0.1 / sqrt(3).
    assert rows["piqa"]["high"] == pytest.approx(0.1 + 4.302653 * 0.1 / 3**0.5, rel=1e-6)
    assert rows["boolq"]["difference"] == 0.0
    assert rows["average of 2"]["difference"] == pytest.approx(0.05)
    assert rows["average of 2"]["signs"] == "0/2"


def test_configs_of_one_experiment_are_kept_apart(make: Any) -> None:
    longer = {"cell_hash": "longer", "pair_hash": "longer 0"}
    records = [make(), make("xsa"), make(checkpoint=longer), make("xsa", checkpoint=longer)]
    assert len({cell_key(record) for record in records}) == 2
    rows = evaluation_effects_table(pair_evaluations(records)).rows
    assert all(row["seeds"] == 1 for row in rows)
    assert len({row["model"] for row in rows}) == 2


def test_the_report_shows_every_evaluation(make: Any, tmp_path: Path) -> None:
    records = tmp_path / "records"
    for record in (make(), make("xsa"), make("xsa", seed=5)):
        write_record(record, records)
    written = {path.name for path in report(records, tmp_path / "out")}
    assert {"evaluations.md", "evaluation-effects.md", "evaluation-documents.csv"} <= written
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "3 downstream evaluations" in readme
    assert "tables/evaluations.md" in readme
    table = (tmp_path / "out" / "tables" / "evaluations.csv").read_text()
    assert table.count("\n") == 1 + 3 * 2 * 2  # header, and per record two tasks of two metrics


def test_a_report_without_pairs_still_shows_the_scores(make: Any, tmp_path: Path) -> None:
    write_record(make("xsa", checkpoint={"pair_hash": None, "experiment": None}), tmp_path / "records")
    report(tmp_path / "records", tmp_path / "out")
    assert not (tmp_path / "out" / "tables" / "evaluation-effects.md").exists()
    assert "model without history" in (tmp_path / "out" / "README.md").read_text()


def test_score_tables_tell_task_metric_error_and_rows(make: Any) -> None:
    text = markdown(score_table(make()))
    assert "| piqa | acc | 0.7500 | 0.1000 | 4 | 100 |" in text
    assert "| average |" in text
    assert "perplexity 12.5000" in text
    assert evaluations_table([make()]).rows[0]["seed"] == "0"


def suite_with_evaluations(make_run: Callable[..., Any]) -> tuple[SuiteView, list[Any], dict[str, Any]]:
    """A suite of one place, two arms and two seeds, and the runs of its cells."""
    runs = {(arm, seed): make_run(arm, seed) for arm in ("sa", "xsa") for seed in range(2)}
    cells = tuple(
        CellView({"size": "small"}, arm, seed, run.config_hash) for (arm, seed), run in runs.items()
    )
    view = SuiteView("name", "cpu", "A title", "a source", "a note", "evaluation", None, cells)
    return view, list(runs.values()), runs


def test_a_suite_compares_scores_on_the_same_documents_only(
    make_run: Callable[..., Any], make: Callable[..., EvalRecord]
) -> None:
    view, records, runs = suite_with_evaluations(make_run)
    few, all_ = {"piqa": [True, False]}, {"piqa": [True, False, True, True]}

    def evaluated(arm: str, seed: int, correct: dict[str, list[bool]], **changes: Any) -> EvalRecord:
        facts = {"config_hash": runs[arm, seed].config_hash}
        return make(arm, seed, correct, checkpoint=facts, **{"limit": None, **changes})

    records += [evaluated(arm, seed, few, limit=2) for arm, seed in runs]
    records += [evaluated("sa", 0, all_), evaluated("xsa", 0, {"piqa": [False, False, True, True]})]
    chosen = suite_evaluations(suite_runs(view, records), records)
    assert len(chosen) == 4
    assert {record.limit for record in chosen.values()} == {2}  # on which all four have scores
    records += [evaluated("sa", 1, all_), evaluated("xsa", 1, {"piqa": [False, False, False, True]})]
    chosen = suite_evaluations(suite_runs(view, records), records)
    assert {record.limit for record in chosen.values()} == {None}  # as many models, more documents
    found = points(view, suite_runs(view, records), suite_values(view, suite_runs(view, records), records))
    assert [point.mean for point in found] == [0.75, 0.375]
    assert found[1].differences == {0: -0.25, 1: -0.5}
    sa, xsa = task_table(view, chosen).rows
    assert (sa["seeds"], sa["piqa"], sa["average"]) == ("2 of 2", 0.75, 0.75)
    assert xsa["piqa"] == 0.375


def test_the_assumed_metric_is_said_where_scores_are_shown(
    make: Callable[..., EvalRecord],
) -> None:
    record = make()
    for table in (score_table(record), evaluations_table([record]), documents_table([])):
        assert any("does not say which accuracy" in note for note in table.notes)
