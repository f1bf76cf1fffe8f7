"""The choice of a learning rate: on finished runs alone, and never at the edge unnoticed."""

import math

import pytest

from results.rates import choose_rate


def searched(make_run, losses, **changes):
    return {rate: [make_run(loss=loss, seed=s, **changes) for s in range(2)] for rate, loss in losses.items()}


def test_the_best_mean_is_chosen_and_known_to_be_inside(make_run):
    choice = choose_rate(searched(make_run, {1e-3: 2.0, 2e-3: 1.5, 4e-3: 1.8}))
    assert (choice.best, choice.inside, choice.seeds) == (2e-3, True, 2)


@pytest.mark.parametrize("losses", [{1e-3: 1.5, 2e-3: 1.8}, {1e-3: 1.8, 2e-3: 1.5}, {1e-3: 1.5}])
def test_a_best_rate_at_the_edge_is_not_inside(make_run, losses):
    assert not choose_rate(searched(make_run, losses)).inside


def test_a_diverged_run_bounds_the_range(make_run):
    runs = searched(make_run, {1e-3: 2.0, 2e-3: 1.5})
    runs[4e-3] = [make_run(status="failed", reason="loss nan", metrics={}, primary_metric=None)] * 2
    choice = choose_rate(runs)
    assert choice.best == 2e-3
    assert choice.inside
    assert math.isinf(choice.losses[4e-3])


@pytest.mark.parametrize("status", [None, "running", "interrupted"])
def test_nothing_is_chosen_while_a_run_is_not_at_its_end(make_run, status):
    runs = searched(make_run, {1e-3: 2.0, 2e-3: 1.5, 4e-3: 1.8})
    runs[4e-3][1] = None if status is None else make_run(status=status, reason="not yet")
    assert choose_rate(runs) is None


def test_no_rates_at_all_is_an_error():
    with pytest.raises(ValueError, match="no learning rates"):
        choose_rate({})


def test_a_metric_that_is_better_when_higher_is_maximised(make_run):
    runs = {
        rate: [make_run(metrics={"validation_accuracy": value}, primary_metric="validation_accuracy")]
        for rate, value in {1e-3: 0.5, 2e-3: 0.9, 4e-3: 0.7}.items()
    }
    assert choose_rate(runs).best == 2e-3
