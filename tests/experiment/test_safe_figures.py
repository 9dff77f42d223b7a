"""What people read of a claim is never better than the claim: figures round to its safe side."""

import copy
import csv
import functools
import io
import json
import math
import re

import dp_accounting as dpa
import numpy as np
import pytest
from rich.console import Console
from test_report import CONFIG, ROWS, SUMMARY, write

from fedjax_dp.audit.noise import StepCheck
from fedjax_dp.audit.runs import AuditResult
from fedjax_dp.cli import audit as audit_command
from fedjax_dp.cli import sweep as sweep_command
from fedjax_dp.cli.output import Output
from fedjax_dp.experiment import Study, report
from fedjax_dp.experiment.running.run import Outcome, round_in_words, summary_in_words
from fedjax_dp.experiment.running.watcher import Health
from fedjax_dp.experiment.studies import sweep
from fedjax_dp.experiment.studies.audits import AuditReport
from fedjax_dp.experiment.studies.selection import Choice
from fedjax_dp.experiment.studies.sweep import Point
from fedjax_dp.io.page import Axis, line_chart
from fedjax_dp.io.statement import _table, write_statement
from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.reports.latex import for_paper
from fedjax_dp.privacy.reports.statement import in_words, statement

# Just above and just below a decimal, to any number of digits that is ever shown.
ABOVE, BELOW = 1 + 3e-9, 1 - 3e-9
VALUES = (2.73, 0.127, 347.0)
STUDY = Study("a", None, {"rate": {"1": ()}}, "rate", "rate", {"epsilon": 1.0})


@functools.cache
def stated():
    ledger = Ledger("record", "zero_out", num_units=2)
    ledger.charge(dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(1.0)), count=2)
    return statement(ledger, 1e-5, num_shared=1, most_holders=2, budget=100.0)


def claim_of(epsilon, dp_delta, **figures):
    """A claim whose figures are these, whatever the accountant says of its events."""
    claim = copy.deepcopy(stated())
    claim |= {"epsilon": epsilon, "dp_delta": dp_delta, "epsilon_per_unit": [epsilon] * 2}
    claim |= {name: [value] * 2 for name, value in figures.items()}
    claim["shared_records"] |= {"epsilon": epsilon, "dp_delta": dp_delta}
    return claim


def printed(show):
    text = io.StringIO()
    console = Console(file=text, soft_wrap=True)
    show(Output(console, console))
    return text.getvalue()


def entry(epsilon):
    found = {"rate": "1", "metric": "epsilon", "mean": epsilon, "std": 0.0, "seeds": 2}
    return found | {"published": epsilon}


def progress_line(epsilon, dp_delta, **_):
    return round_in_words(1, 2, {"epsilon_client": epsilon, "epsilon_record": epsilon})


def result_line(epsilon, dp_delta, **_):
    of_all = {"epsilon": epsilon, "dp_delta": dp_delta, "dp_delta_smallest": dp_delta}
    shared = {f"{k}_of_shared_record": of_all[k] for k in ("epsilon", "dp_delta")}
    taken = {"rounds": 1, "seconds": 9.0, "seconds_rounds": 2.0, "covered_models": ""}
    return summary_in_words(taken | of_all | shared)


def sweep_line(epsilon, dp_delta, monkeypatch, tmp_path, **_):
    def run_together(jobs, watcher, ended, stated):
        for i in jobs:
            ended(i, Outcome(tmp_path, {"epsilon": epsilon, "seconds": 9.0}, "finished", False))
        return {}, False

    lines = []
    monkeypatch.setattr(sweep, "loaded", lambda study, point: None)
    monkeypatch.setattr(sweep, "batches", lambda pending: [list(pending)])
    monkeypatch.setattr(sweep, "run_together", run_together)
    monkeypatch.setattr(sweep, "assembled_before", lambda jobs, groups, watcher: jobs)
    sweep.sweep(STUDY, [Point({"rate": "1"}, ())], tmp_path, lines.append)
    return " ".join(lines)


def sweep_tables(epsilon, dp_delta, **_):
    rows = [{"trial": 1, "epsilon": epsilon, "privacy.record.dp_delta": dp_delta}]
    return "\n".join(
        (
            *(sweep.as_csv([entry(epsilon)]), sweep.as_grid(STUDY, [entry(epsilon)])),
            *(sweep.as_list(STUDY, [entry(epsilon)]), sweep.as_rows(rows), sweep.as_csv(rows)),
        )
    )


def selection(epsilon, dp_delta, monkeypatch, tmp_path, **_):
    choice = Choice(tmp_path, Point({"rate": "1"}, ()), tmp_path, {"client": epsilon})
    monkeypatch.setattr(sweep_command, "select_privately", lambda *a, **b: choice)
    given = STUDY, [], tmp_path, None, "test_accuracy", sweep_command.Where(), _output()
    return printed(sweep_command._selected(*given).show)


def _output():
    console = Console(file=io.StringIO())
    return Output(console, console)


def chart(epsilon, dp_delta, **_):
    points = [(1.0, epsilon), (2.0, epsilon)]
    html = line_chart("ε", {"spent": points}, Axis("round"), Axis("ε", 0.0))
    # Without the ticks.
    return re.search(r'aria-label="([^"]*)"', html)[1]


def page(epsilon, dp_delta, tmp_path, **_):
    figures = {name: epsilon for name in ("epsilon_client", "epsilon_record")}
    rows = [row | figures | {"epsilon_record_smallest": epsilon} for row in ROWS]
    summary = SUMMARY | figures | {"epsilon_of_shared_record": epsilon, "dp_delta": dp_delta}
    folder = write(tmp_path / "run", rows=rows, summary=summary, config=CONFIG, statement="")
    return report(folder).file.read_text("utf-8")


def audit(epsilon, dp_delta, **_):
    bound = AuditResult("client", "gaussian", dp_delta, 0.0, epsilon, 0.5, 1, 1)
    found = AuditReport([bound], {"client": [StepCheck("step", 0.0, epsilon)]}, None)
    return printed(lambda out: audit_command._show(out, found, 1.0))


def warning(epsilon, dp_delta, **_):
    lines = []
    Health(lines.append).note_epsilon(1000 * epsilon)
    return "".join(lines)


WRITERS = {
    "statement": lambda epsilon, dp_delta, **_: in_words(claim_of(epsilon, dp_delta)),
    "paper": lambda epsilon, dp_delta, **_: for_paper([claim_of(epsilon, dp_delta)]).latex,
    **{f.__name__: f for f in (progress_line, result_line, sweep_line, sweep_tables, selection)},
    **{f.__name__: f for f in (chart, page, audit, warning)},
}


def numbers_near(text, value):
    """The numbers in a text that stand for a value, but for their last digits."""
    text = re.sub(r"(\S+) \\cdot 10\^\{(\S+?)\}", r"\1e\2", text)
    found = map(float, re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?", text))
    return [number for number in found if math.isclose(number, value, rel_tol=2e-3)]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", WRITERS)
def test_no_writer_shows_less_than_the_epsilon_and_delta_that_it_is_given(
    name, value, monkeypatch, tmp_path
):
    epsilon, dp_delta = value * ABOVE, 1.7e-5 * ABOVE
    with_delta = {"statement", "paper", "result_line", "sweep_tables", "audit", "page"}
    own = {"monkeypatch": monkeypatch, "tmp_path": tmp_path}
    text = WRITERS[name](epsilon, dp_delta, **own)
    exact = epsilon * (1000 if name == "warning" else 1)
    found = numbers_near(text, exact)
    assert found and min(found) >= exact
    found = numbers_near(text, dp_delta)
    assert bool(found) == (name in with_delta) and all(delta >= dp_delta for delta in found)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    ("figure", "is_bound"),
    [
        *(("noise_multiplier", False), ("laplace_scale", False), ("entry_stddev", False)),
        *(("discrete_multiplier", False), ("noise_multiplier_per_unit", False)),
        *(("clip_norm_per_unit", True), ("sampling_rate", True), ("dp_delta_per_unit", True)),
    ],
)
def test_noise_is_never_shown_larger_nor_a_bound_smaller_than_it_was(
    figure, is_bound, value, tmp_path
):
    exact = value * (ABOVE if is_bound else BELOW)
    claim = claim_of(1e-7, 1e-7, **{figure: exact})
    # For the table, which has what differs by unit.
    claim[figure] = [exact, exact * (1 + 1e-12)]
    texts = [in_words(claim), for_paper([claim]).latex]
    if figure.endswith("_per_unit"):
        texts.append(_table(claim))
    found = [number for text in texts for number in numbers_near(text, exact)]
    assert found
    assert min(found) >= exact if is_bound else max(found) <= exact


def test_proven_bounds_and_budgets_are_never_shown_larger():
    bound = AuditResult("client", "gaussian", 1e-5, 2 * BELOW, 8.0, 0.7 * BELOW, 1, 1)
    found = AuditReport([bound], {"client": [StepCheck("step", 3 * BELOW, 9.0)]}, None)
    text = printed(lambda out: audit_command._show(out, found, 1.0))
    for exact in (2 * BELOW, 0.7 * BELOW, 3 * BELOW):
        assert max(numbers_near(text, exact)) <= exact
    claim = claim_of(1.0, 1e-5)
    claim["budget_per_unit"] = [5.77 * BELOW] * 2
    for text in (in_words(claim), for_paper([claim]).latex):
        assert max(numbers_near(text, 5.77 * BELOW)) <= 5.77 * BELOW


def test_numbers_that_rounds_run_with_are_shown_as_they_were_given():
    """A clip norm of 0.1 is a float32 a little above it."""
    given = float(np.float32(0.1)), float(np.float32(0.7))
    claim = claim_of(1.0, 1e-5, clip_norm_per_unit=given[0], noise_multiplier=given[1])
    assert "contribution is 0.1. " in in_words(claim)
    assert "deviation of 0.7 times" in in_words(claim)


def test_an_infinite_epsilon_is_averaged_and_shown():
    rows = [json.loads('{"epsilon": "inf", "rate": "1"}')]
    (found,) = sweep.average_over_seeds(STUDY, rows)
    assert found["mean"] == math.inf and "inf" in sweep.as_list(STUDY, [found])


def test_counts_of_releases_are_whole():
    ledger = Ledger("client", "zero_out")
    ledger.charge(dpa.GaussianDpEvent(900.0), count=123_456)
    claim = statement(ledger, 1e-5)
    assert "123456 releases are composed" in in_words(claim)
    assert "$123456$ releases are composed" in for_paper([claim]).latex


def test_a_table_on_disk_has_what_the_words_have(tmp_path):
    ledger = Ledger("record", "zero_out", num_units=2)
    ledger.charge(dpa.GaussianDpEvent(2.0), units=[0, 1], count=[1, 3])
    facts = {"clip_norm_per_unit": np.array([0.25, 0.5]), "budget": [1.0, 9.0]}
    (claim,) = write_statement(
        tmp_path, {"record": ledger}, {"record": 1e-5}, "rdp", {"record": facts}
    )
    rows = [
        line
        for line in (tmp_path / "privacy.md").read_text("utf-8").splitlines()
        if line[:2] == "| "
    ]
    assert rows[0] == "| client | ε | releases | budget of ε | clip norm |"
    cells = [float(cell) for cell in rows[2].strip("| ").split(" | ")]
    assert cells[1] >= claim["epsilon_per_unit"][1] and cells[3:] == [9.0, 0.5]


def test_no_cell_of_a_sweep_is_a_formula_or_another_row():
    name = "=cmd|' /C calc'!A0\n| x | 0.01 |"
    rows = [entry(2.0) | {"rate": name}, entry(2.0) | {"rate": "-0.5"}]
    lines = list(csv.reader(io.StringIO(sweep.as_csv(rows))))
    assert len(lines) == 3 and lines[1][0].startswith("'=") and lines[2][0] == "-0.5"
    assert len(sweep.as_list(STUDY, rows).splitlines()) == 4
