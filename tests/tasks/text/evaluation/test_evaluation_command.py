"""./xsa eval from a model to its record: what is scored, what is kept, what a mistake says."""

import json
from pathlib import Path
from typing import Any

import pytest

from results.eval_record import EvalRecord
from results.store import read_record
from tasks.runner import cli
from tasks.text.evaluation.evaluate import evaluate_tasks
from tasks.text.trained import Trained, export_model, import_model

HISTORY = {
    "run_id": "text-tiny_xsa_adamw_s3_00000000",
    "experiment": "text/tiny",
    "variant": "sa",
    "attention": {"variant": "sa", "strength": 1.0, "layers": "all", "backend": "auto"},
    "optimizer": "adamw",
    "seed": 3,
    "step": 7,
    "config_hash": "0" * 16,
    "pair_hash": "1" * 16,
    "cell_hash": "2" * 16,
    "data_fingerprint": "made-up",
}


@pytest.fixture(scope="module")
def exported(byte_model: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported directory with a made-up history."""
    directory = tmp_path_factory.mktemp("model")
    export_model(Trained(byte_model.model, byte_model.tokenizer, HISTORY), directory)
    return directory


def evaluate(exported: Path, documents: Path, records: Path, *more: str) -> int:
    arguments = [
        "eval",
        str(exported),
        "--data-dir",
        str(documents),
        "--records",
        str(records),
        "--device",
        "cpu",
    ]
    return cli.main([*arguments, "--threads", "1", *more])


def only_record(records: Path) -> EvalRecord:
    (path,) = records.glob("*.json")
    record = read_record(path)
    assert isinstance(record, EvalRecord)
    return record


def test_the_record_holds_what_the_harness_found(
    exported: Path, made_up_documents: Path, tmp_path: Path, capsys: Any
) -> None:
    assert evaluate(exported, made_up_documents, tmp_path, "--limit", "4", "--precision", "float64") == 0
    shown = capsys.readouterr().out
    record = only_record(tmp_path)
    found = evaluate_tasks(
        import_model(exported), list(record.tasks), data_dir=str(made_up_documents), limit=4
    )
    assert len(record.tasks) == 8
    for name, result in record.tasks.items():
        assert name in shown
        assert result.metrics == pytest.approx(found[name].metrics)
        assert result.correct() == found[name].correct[result.primary_metric]
        assert (result.rows, result.rows_available) == (4, 6)
    assert record.limit == 4
    assert record.checkpoint.seed == 3
    assert record.checkpoint.weights_sha256 == import_model(exported).weights_sha256()
    assert record.mean == pytest.approx(sum(r.metrics[r.primary_metric] for r in record.tasks.values()) / 8)
    assert str(exported) not in json.dumps(record.model_dump())  # records are read elsewhere
    assert str(made_up_documents) not in json.dumps(record.model_dump())


def test_the_same_evaluation_replaces_its_record_and_another_does_not(
    exported: Path, made_up_documents: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        assert evaluate(exported, made_up_documents, tmp_path, "--tasks", "piqa,boolq") == 0
    first = only_record(tmp_path)
    assert first.limit is None
    assert first.tasks["piqa"].rows == 6
    assert evaluate(exported, made_up_documents, tmp_path, "--tasks", "piqa,boolq", "--limit", "2") == 0
    assert len(list(tmp_path.glob("*.json"))) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "--limit: expected at least 1"),
        (["--batch-tokens", "-3"], "--batch-tokens: expected at least 1"),
        (["--tasks", "piqa,"], "--tasks: expected paper8"),
        (["--tasks", "no_such_task"], "no layout known for no_such_task"),
        (["--data-dir", "absent"], "no documents of arc_easy"),
        (["--tokenizer", "gpt2"], "tokenizer gpt2 has 50257 tokens"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_users_mistake_is_one_line_and_leaves_no_record(
    arguments: list[str], message: str, exported: Path, made_up_documents: Path, tmp_path: Path, capsys: Any
) -> None:
    assert evaluate(exported, made_up_documents, tmp_path / "records", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("xsa: error: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "records").exists()
