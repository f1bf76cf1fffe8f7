"""The benchmark of downstream evaluation compares ways that give the same scores of the same requests."""

import pytest
import torch

from tasks.bench import evaluation
from tasks.text.evaluation.scoring import Score

CPU = torch.device("cpu")


def test_every_way_scores_alike_and_the_baseline_has_a_speed_up_of_one():
    rows = evaluation.measure(256, documents=8, device=CPU, rounds=1)
    assert [row["adapter"] for row in rows] == list(evaluation.candidates(evaluation.make_work(256, 8, CPU)))
    assert rows[0]["adapter"] == evaluation.BASELINE
    assert rows[0]["speedup"] == 1.0
    for row in rows:
        # Sums of a hundred float32 logarithms, relative to their size.
        assert row["largest_relative_difference"] < 100 * torch.finfo(torch.float32).eps
        assert row["documents_per_second"] > 0


def test_a_way_that_scores_otherwise_is_not_measured(monkeypatch):
    def wrong(model, requests):
        return [Score(-1.0, False) for _ in requests]

    monkeypatch.setattr(evaluation, "one_by_one", wrong)
    with pytest.raises(ValueError, match="the adapter is wrong"):
        evaluation.measure(256, documents=8, device=CPU, rounds=1)


def test_documents_have_the_choices_of_their_task_and_one_context():
    requests = evaluation.make_requests(8, 256, 1.0)
    contexts = {tuple(context) for context, _ in requests}
    assert len(contexts) == 8
    assert len(requests) == sum(choices for _, _, choices in evaluation.SHAPES.values())
    assert evaluation.make_requests(8, 256, 1.0) == requests
    shorter = evaluation.make_requests(8, 256, 4.0)
    assert sum(len(c) for c, _ in shorter) == pytest.approx(sum(len(c) for c, _ in requests) / 4, rel=0.05)
