"""The harness's own definitions run offline on local documents; their scores are those of brute force."""

import math
import os
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import yaml

from tasks.errors import UserError
from tasks.text.evaluation.evaluate import TaskScores, evaluate_tasks
from tasks.text.evaluation.tasks import PAPER8, load_tasks, primary_metric, task_names
from tasks.text.trained import Trained

DATA = Path(os.environ.get("XSA_TEST_DATA", Path(__file__).resolve().parents[5] / "shared" / "data"))


@pytest.fixture(scope="module")
def scores(byte_model: Trained, made_up_documents: Path) -> dict[str, TaskScores]:
    return evaluate_tasks(byte_model, list(PAPER8), data_dir=str(made_up_documents), limit=5)


@pytest.fixture(scope="module")
def loaded(made_up_documents: Path) -> dict[str, Any]:
    return load_tasks(list(PAPER8), str(made_up_documents))["tasks"]


class _Definitions(yaml.SafeLoader):
    """YAML of the harness as plain data: `!function module.name` becomes its name."""


_Definitions.add_constructor("!function", lambda loader, node: node.value.rpartition(".")[2])


def test_only_where_the_data_are_is_changed_in_a_definition(loaded: dict[str, Any]) -> None:
    for name, task in loaded.items():
        folder = Path(lm_eval.__file__).parent / "tasks" / PAPER8[name].package
        definitions = [yaml.load(path.read_text(), _Definitions) for path in folder.glob("*.yaml")]
        (packaged,) = (found for found in definitions if found.get("task") == name)
        assert {"doc_to_text", "doc_to_target", "output_type", "metric_list"} <= packaged.keys()
        for key in packaged.keys() - {"dataset_path", "dataset_name", "dataset_kwargs", "tag"}:
            found, expected = getattr(task.config, key), packaged[key]
            if key == "metric_list":
                found, expected = ([metric["metric"] for metric in part] for part in (found, expected))
            elif key == "metadata":
                found, expected = found["version"], expected["version"]
            elif callable(found):
                found = found.__name__
            assert found == expected, (name, key)
        assert task.config.num_fewshot == 0
        assert task.config.dataset_path == "json"


def test_every_task_is_evaluated_on_its_own_split(loaded: dict[str, Any]) -> None:
    for name, task in loaded.items():
        expected = task.config.test_split or task.config.validation_split
        assert expected == PAPER8[name].split
        assert len(list(task.eval_docs)) == 6


def test_multiple_choice_scores_are_those_of_brute_force(
    scores: dict[str, TaskScores], loaded: dict[str, Any], byte_model: Trained, score_explicitly: Any
) -> None:
    for name in ("arc_easy", "boolq", "hellaswag", "openbookqa", "piqa", "social_iqa"):
        task = loaded[name]
        right, right_normalised = [], []
        for doc in list(task.eval_docs)[:5]:
            context, choices = task.doc_to_text(doc), task.doc_to_choice(doc)
            logs = [
                score_explicitly(
                    byte_model.model, byte_model.encode(context), byte_model.encode(f" {choice}")
                )[0]
                for choice in choices
            ]
            normalised = [log / len(choice) for log, choice in zip(logs, choices, strict=True)]
            target = int(task.doc_to_target(doc))
            right.append(logs.index(max(logs)) == target)
            right_normalised.append(normalised.index(max(normalised)) == target)
        found = scores[name]
        assert found.correct["acc"] == right, name
        assert found.metrics["acc"] == pytest.approx(sum(right) / 5)
        if "acc_norm" in found.metrics:
            assert found.correct["acc_norm"] == right_normalised, name
        share = sum(right) / 5
        # The harness's standard error of a mean of n zeros and ones: sample deviation over root n.
        assert found.stderr["acc"] == pytest.approx(math.sqrt(share * (1 - share) / 4))


def test_lambada_scores_the_last_word_and_its_perplexity(
    scores: dict[str, TaskScores], loaded: dict[str, Any], byte_model: Trained, score_explicitly: Any
) -> None:
    logs, greedy = [], []
    for doc in list(loaded["lambada_openai"].eval_docs)[:5]:
        context, _, word = doc["text"].rpartition(" ")
        log, same = score_explicitly(
            byte_model.model, byte_model.encode(context), byte_model.encode(f" {word}")
        )
        logs.append(log)
        greedy.append(same)
    found = scores["lambada_openai"]
    assert found.metrics["perplexity"] == pytest.approx(math.exp(-sum(logs) / 5))
    assert found.correct == {"acc": greedy}
    assert found.primary == "acc"


def test_winogrande_scores_the_same_ending_after_each_option(
    scores: dict[str, TaskScores], loaded: dict[str, Any], byte_model: Trained, score_explicitly: Any
) -> None:
    right = []
    for doc in list(loaded["winogrande"].eval_docs)[:5]:
        before, _, after = doc["sentence"].partition("_")
        logs = [
            score_explicitly(
                byte_model.model,
                byte_model.encode(before + doc[option]),
                byte_model.encode(f" {after.strip()}"),
            )[0]
            for option in ("option1", "option2")
        ]
        right.append(logs.index(max(logs)) == int(doc["answer"]) - 1)
    assert scores["winogrande"].correct["acc"] == right


def test_rows_requests_and_cuts_are_counted(scores: dict[str, TaskScores]) -> None:
    for found in scores.values():
        assert (found.rows, found.available) == (5, 6)
    assert scores["arc_easy"].requests == 20
    assert scores["lambada_openai"].requests == 5
    assert scores["boolq"].cut_contexts > 0  # a passage of up to twelve words and a window of 64 bytes
    assert len({found.documents_sha256 for found in scores.values()}) == len(scores)


def test_documents_are_identified_by_what_they_are(
    byte_model: Trained, made_up_documents: Path, scores: dict[str, TaskScores]
) -> None:
    again = evaluate_tasks(byte_model, ["piqa"], data_dir=str(made_up_documents), limit=5)["piqa"]
    assert again == scores["piqa"]
    fewer = evaluate_tasks(byte_model, ["piqa"], data_dir=str(made_up_documents), limit=4)["piqa"]
    assert fewer.documents_sha256 != again.documents_sha256
    assert fewer.correct["acc"] == again.correct["acc"][:4]


def test_documents_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no documents of piqa; expected .*piqa/validation\.jsonl"):
        load_tasks(["piqa"], str(tmp_path))
    with pytest.raises(UserError, match="no layout known for mmlu"):
        load_tasks(["mmlu"], str(tmp_path))


def test_documents_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "piqa" / "validation.jsonl"
    path.parent.mkdir()
    path.write_text("{not json\n")
    with pytest.raises(UserError, match="not readable as task data") as caught:
        load_tasks(["piqa"], str(tmp_path))
    assert "\n" not in str(caught.value)


def test_tasks_are_chosen_by_suite_or_by_name() -> None:
    assert task_names("paper8") == ("paper8", list(PAPER8))
    assert task_names("piqa, boolq") == ("tasks", ["piqa", "boolq"])
    assert task_names("piqa") == ("piqa", ["piqa"])
    for wrong in ("", "piqa,", "piqa,piqa"):
        with pytest.raises(UserError, match="--tasks"):
            task_names(wrong)
    assert primary_metric("other", ["f1", "acc"]) == "acc"
    assert primary_metric("other", ["f1"]) == "f1"


def test_the_public_documents_are_read_whole() -> None:
    folder = DATA / "lm_eval"
    if not folder.is_dir():
        pytest.skip(f"no {folder}; set XSA_TEST_DATA to a folder that has lm_eval")
    rows = {
        name: len(list(task.eval_docs))
        for name, task in load_tasks(list(PAPER8), str(folder))["tasks"].items()
    }
    assert rows["arc_easy"] == 2376
    assert rows["boolq"] == 3270
    assert rows["lambada_openai"] == 5153
    assert rows["winogrande"] == 1267


def test_documents_that_the_harness_stumbles_over_are_one_line_and_our_own_faults_are_not(
    byte_model: Trained, made_up_documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.text.evaluation.scoring import Scorer

    def evaluated() -> None:
        evaluate_tasks(byte_model, ["piqa"], data_dir=str(made_up_documents), limit=1)

    def fails(*arguments: Any, **options: Any) -> None:
        raise KeyError("gold")

    with monkeypatch.context() as patch:
        patch.setattr("lm_eval.api.task.ConfigurableTask.process_results", fails)
        with pytest.raises(
            UserError, match=r"task piqa: the harness cannot use .*KeyError: 'gold'"
        ) as caught:
            evaluated()
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(Scorer, "__call__", fails)
    with pytest.raises(KeyError, match="gold"):
        evaluated()
