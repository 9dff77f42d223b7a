"""How evenly clients are served, against numbers worked out by hand."""

import math

import numpy as np
import pytest

from fedjax_dp.evaluation import Evaluation, summarize

NAN = math.nan


def evaluation_of(accuracies, losses, sizes):
    return Evaluation(
        loss=0.0,
        accuracy=0.0,
        client_loss=np.array(losses, np.float64),
        client_accuracy=np.array(accuracies, np.float64),
        client_sizes=np.array(sizes),
    )


def test_a_summary_by_hand():
    """Clients 0.5, 1.0, 0.0, 0.7 and one without data; each counts once, whatever its size."""
    evaluation = evaluation_of(
        [0.5, NAN, 1.0, 0.0, 0.7], [1.0, NAN, 0.1, 3.0, 0.5], [2, 0, 9, 1, 4]
    )
    summary = summarize(evaluation)
    deviations = np.array([0.05, 0.45, 0.55, 0.15])
    assert summary == pytest.approx(
        {
            "worst_client_loss": 3.0,
            "worst_client_accuracy": 0.0,
            # A tenth of four clients, rounded up, is one.
            "worst_tenth_accuracy": 0.0,
            "best_client_accuracy": 1.0,
            "accuracy_disparity": 1.0,
            "mean_client_accuracy": 0.55,
            "std_client_accuracy": math.sqrt((deviations**2).sum() / 4),
            # Sorted 0, 0.5, 0.7, 1: the quantile at share q lies at 3q, linear in between.
            "client_accuracy_q10": 0.3 * 0.5,
            "client_accuracy_q25": 0.75 * 0.5,
            "client_accuracy_q50": 0.6,
            "client_accuracy_q75": 0.7 + 0.25 * 0.3,
            "client_accuracy_q90": 0.7 + 0.7 * 0.3,
        }
    )


@pytest.mark.parametrize("count, worst", [(10, 0.0), (20, 0.5 / 20), (21, 1 / 21)])
def test_the_worst_tenth_is_a_mean_over_clients(count, worst):
    """Accuracies 0, 1/n, 2/n, ...: of 20 clients the worst two, of 21 the worst three."""
    evaluation = evaluation_of(np.arange(count) / count, np.zeros(count), np.ones(count))
    assert summarize(evaluation)["worst_tenth_accuracy"] == pytest.approx(worst)


def test_quantiles_are_chosen():
    evaluation = evaluation_of([0.2, 0.4, 0.6], [1, 1, 1], [1, 1, 1])
    summary = summarize(evaluation, (0.0, 0.05, 1.0))
    named = {k: v for k, v in summary.items() if "_q" in k}
    assert named == pytest.approx(
        {"client_accuracy_q00": 0.2, "client_accuracy_q05": 0.22, "client_accuracy_q100": 0.6}
    )


def test_one_client_is_its_own_best_and_worst():
    summary = summarize(evaluation_of([0.25], [2.0], [3]))
    assert summary["worst_client_accuracy"] == summary["best_client_accuracy"] == 0.25
    assert summary["accuracy_disparity"] == summary["std_client_accuracy"] == 0.0


def test_without_accuracies_there_is_a_loss_and_without_data_nothing():
    assert summarize(evaluation_of([NAN, NAN], [1.0, 2.0], [1, 1])) == {"worst_client_loss": 2.0}
    assert summarize(evaluation_of([NAN, NAN], [NAN, NAN], [0, 0])) == {}


def test_a_loss_that_diverged_is_the_worst():
    infinite = summarize(evaluation_of([0.5, 0.1], [1.0, math.inf], [1, 1]))
    assert infinite["worst_client_loss"] == math.inf
    undefined = summarize(evaluation_of([0.5, 0.1, NAN], [1.0, NAN, NAN], [1, 1, 0]))
    assert math.isnan(undefined["worst_client_loss"])
