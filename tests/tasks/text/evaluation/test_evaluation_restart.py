"""An evaluation that is killed goes on where it was, and ends with the record of one that was not."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from results.eval_record import EvalRecord
from results.store import read_record
from tasks.errors import UserError
from tasks.runner import cli
from tasks.text.evaluation.harness import HarnessModel
from tasks.text.evaluation.journal import Journal, source_digest
from tasks.text.evaluation.scoring import Scorer
from tasks.text.trained import Trained, export_model

REQUESTS = [([1, 2, 3], [n]) for n in range(4)] + [([5, n, 6], [n + 1, 7]) for n in range(6)]


@pytest.fixture
def exported(byte_model: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An exported model whose scores are kept below the test's own directory."""
    monkeypatch.setattr("tasks.runner.evaluation.cache_root", lambda: tmp_path / "cache")
    export_model(byte_model, tmp_path / "model")
    return tmp_path / "model"


def arguments(exported: Path, documents: Path, records: Path) -> list[str]:
    return [
        *("eval", str(exported), "--data-dir", str(documents), "--records", str(records)),
        *("--tasks", "piqa,boolq", "--device", "cpu", "--threads", "1", "--batch-tokens", "128"),
    ]


def in_a_child(work: Callable[[], object]) -> int:
    """Do some work in a forked process; return its wait status."""
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(100)
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def only_record(records: Path) -> dict[str, Any]:
    (path,) = records.glob("*.json")
    record = read_record(path)
    assert isinstance(record, EvalRecord)
    return record.model_dump(exclude={"seconds", "started_at", "finished_at"})


def test_killed_at_several_batches_it_goes_on_and_gives_the_same_record(
    exported: Path, made_up_documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert cli.main(arguments(exported, made_up_documents, tmp_path / "whole")) == 0
    computed = []
    append = Journal._append

    def counted(self: Journal, line: dict[str, Any], until: int | None = None) -> None:
        append(self, line)
        computed.append(line["key"])
        if len(computed) == until:
            os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(2):

        def until_killed() -> None:
            monkeypatch.setattr(Journal, "_append", lambda self, line: counted(self, line, until=2))
            cli.main(arguments(exported, made_up_documents, tmp_path / "killed"))

        status = in_a_child(until_killed)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert not (tmp_path / "killed").exists()
    (journal,) = (tmp_path / "cache").rglob("scores-*.jsonl")
    kept = [json.loads(line)["key"] for line in journal.read_bytes().splitlines()]
    assert len(set(kept)) == 4
    monkeypatch.setattr(Journal, "_append", counted)
    capsys.readouterr()
    assert cli.main(arguments(exported, made_up_documents, tmp_path / "killed")) == 0
    assert "going on: 4 batches are kept" in capsys.readouterr().out
    assert computed
    assert not set(computed) & set(kept)
    assert only_record(tmp_path / "killed") == only_record(tmp_path / "whole")
    assert not list((tmp_path / "cache").rglob("scores-*.jsonl"))  # the record is what stays


def test_kept_scores_are_used_for_the_same_tokens_only(make_gpt: Callable[..., Any], tmp_path: Path) -> None:
    model = make_gpt()
    wanted = Scorer(model, budget=12)(REQUESTS)
    assert Scorer(model, budget=12, journal=Journal(tmp_path / "kept"))(REQUESTS) == wanted
    again = Journal(tmp_path / "kept")
    count = again.kept
    assert count > 2
    assert Scorer(make_gpt(n_heads=4), budget=12, journal=again)(REQUESTS) == wanted  # nothing was computed
    assert (again.used, again.kept) == (count, 0)
    assert again.seconds > 0
    changed = [([*context, 0], target) for context, target in REQUESTS]
    other = Journal(tmp_path / "kept")
    assert Scorer(model, budget=12, journal=other)(changed) == Scorer(model, budget=12)(changed)
    assert other.used == 0


def test_lines_that_were_cut_short_or_damaged_are_computed_anew(
    make_gpt: Callable[..., Any], tmp_path: Path
) -> None:
    model, path = make_gpt(), tmp_path / "kept"
    wanted = Scorer(model, budget=12, journal=Journal(path))(REQUESTS)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([b"{no json\n", b'{"key": "a"}\n', *lines[1:-1], lines[-1][:-9]]))
    journal = Journal(path)
    assert journal.kept == len(lines) - 2
    assert Scorer(model, budget=12, journal=journal)(REQUESTS) == wanted
    assert Journal(path).kept == len(lines)


def test_continuations_are_kept_too(byte_model: Trained, tmp_path: Path) -> None:
    from lm_eval.api.instance import Instance

    options = {"until": ["e"], "max_gen_toks": 5, "do_sample": True, "temperature": 1.0}
    asked = [
        Instance("generate_until", {}, (text, dict(options)), index) for index, text in enumerate(("ab", "c"))
    ]
    first = HarnessModel(byte_model, journal=Journal(tmp_path / "kept")).generate_until(asked)
    again = Journal(tmp_path / "kept")
    assert HarnessModel(byte_model, journal=again).generate_until(asked) == first
    assert again.used == 1
    other = Journal(tmp_path / "kept")
    HarnessModel(byte_model, seed=1, journal=other).generate_until(asked)
    assert other.used == 0


def test_a_journal_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be kept") as caught:
        Journal(tmp_path / "file" / "kept").recall(lambda: "key", lambda: [1])
    assert "\n" not in str(caught.value)


def test_results_of_other_code_are_not_taken_for_this_codes(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    before = source_digest(tmp_path)
    (tmp_path / "a.txt").write_text("no code")
    assert source_digest(tmp_path) == before
    (tmp_path / "a.py").write_text("2")
    assert source_digest(tmp_path) != before
