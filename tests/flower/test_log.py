"""What people read of a run in Flower: progress by round, the result, and why it ended."""

import io
import logging
import pathlib

import pytest

from fedjax_dp.experiment.running.run import Outcome
from fedjax_dp.flower.log import LoggedProgress, close

SUMMARY = {
    "rounds": 3,
    "stopped_by": "patience",
    "seconds": 12.0,
    "seconds_rounds": 9.5,
    "test_accuracy": 0.5,
    "test_accuracy_of": "the shared model",
    "epsilon": 2.5,
    "dp_delta": 1e-5,
    "dp_delta_smallest": 1e-5,
    "covered_models": "all models",
}


def outcome(**ended):
    parts = {"ended": "finished", "is_futile": False}
    return Outcome(pathlib.Path("/runs/1"), SUMMARY, **{**parts, **ended})


@pytest.fixture
def lines(caplog, monkeypatch):
    # Flower's logger hands nothing on to others.
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level(logging.INFO, logger="flwr")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("ended", "why"),
    [("callback", " by patience"), ("budget", ": one more would exceed the budget")],
)
def test_rounds_and_the_result_are_logged(lines, ended, why):
    progress = LoggedProgress(3)
    progress.phase("compiling")
    progress.done(2, {"test_accuracy": 0.25, "epsilon_client": 1.5})
    close(outcome(ended=ended))
    assert lines() == [
        "compiling",
        "round 2 of 3, accuracy 0.250, ε 1.5 (client)",
        "/runs/1: 3 rounds in 9.5 s (12.0 s with reading and compiling), "
        "test accuracy of the shared model 0.5000, "
        "ε = 2.5 at δ = 1e-05, which covers all models",
        f"stopped after round 3{why}",
    ]


def test_a_handler_of_the_root_logger_does_not_print_a_line_again(monkeypatch):
    printed = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(printed)])
    LoggedProgress(3).phase("compiling")
    assert not printed.getvalue()


@pytest.mark.parametrize(
    ("ended", "error", "message"),
    [
        ({"ended": "budget", "is_futile": True}, RuntimeError, "no client's work entered the mod"),
        (
            {"ended": "interrupted"},
            RuntimeError,
            "interrupted after round 3; another `flwr run` resumes",
        ),
        ({"is_futile": True}, RuntimeError, "no client's work entered the model"),
    ],
)
def test_a_run_that_did_not_finish_says_why(lines, ended, error, message):
    with pytest.raises(error, match=message):
        close(outcome(**ended))
    assert lines()[0].startswith("/runs/1: 3 rounds")
