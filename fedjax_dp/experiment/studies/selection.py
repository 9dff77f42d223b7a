"""Chooses among the runs of a grid, with a privacy cost that covers the choice."""

import json
import math
import pathlib
import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from fedjax_dp.core import checks, files, jaxprs
from fedjax_dp.engine.cohorts import Cohorts
from fedjax_dp.experiment.components.experiment import Experiment
from fedjax_dp.experiment.components.keeping import loss_of, require_direction
from fedjax_dp.experiment.running.metric_names import OBJECTIVE, require_metrics
from fedjax_dp.experiment.running.release import (
    RELEASED,
    STATEMENT_FILES,
    Mark,
    public_facts,
    require_publishable,
)
from fedjax_dp.experiment.running.results import facts_of
from fedjax_dp.experiment.running.run_folder import RELEASE_FOLDER, SUMMARY_FILE
from fedjax_dp.experiment.running.starting import accounting_of, first_state
from fedjax_dp.experiment.running.watcher import Watcher, large_deltas
from fedjax_dp.experiment.studies.batched_runs import Job, assembled
from fedjax_dp.experiment.studies.cluster import Cluster
from fedjax_dp.experiment.studies.sweep import Point, Study, loaded, run_all
from fedjax_dp.io.digests import read_sealed_object
from fedjax_dp.io.logbook import write_json
from fedjax_dp.io.statement import write_statement
from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.mechanisms.selection import Repetition

# In the folder of a selection. What was drawn is secret: it shows how many trials there were.
TRIALS_FILE, CHOSEN_FOLDER, SETTING_FILE = "trials.json", "chosen", "setting.json"


class Choice(NamedTuple):
    """The best of a random number of trials."""

    trial: pathlib.Path  # The run folder of the chosen one.
    point: Point  # The setting that it ran.
    # What may be published: the statement of the choice, the setting and the model.
    folder: pathlib.Path
    # ε of all trials and the choice, by unit, the largest of all accounts.
    epsilon: dict[str, float]


def select_privately(
    study: Study,
    grid: Sequence[Point],
    output: pathlib.Path,
    trials: Repetition,
    report: Callable[[str], None] = print,
    warn: Callable[[str], None] = warnings.warn,
    cluster: Cluster | None = None,
    metric: str = "test_accuracy",
) -> Choice | None:
    """Runs a random number of trials, each of a point drawn at random, and chooses the best.

    The metric is a figure on the data set's own test part, which the claim does not protect.

    Guarantee: the folder `chosen`, which has the model of the chosen run and its setting, has the ε
    of its statement, if nothing else is published: neither other trials nor their number, which the
    server and those who run them know. Every trial costs the same, whatever its setting, and may be
    released; this is required of all points before any runs.

    Source: Papernot and Steinke 2022.
    """
    files.require_folder(output, "--output", writable=True)
    require_direction(metric, "--metric", metric)
    rule = "begin with test_, for a private selection: other figures are of records of clients"
    checks.require(metric.startswith("test_"), "--metric", rule, metric)
    plans = output / "plans"
    jobs = {i: Job(loaded(study, point), plans / point.folder) for i, point in enumerate(grid)}
    experiments = [experiment for _, experiment in assembled(jobs, Watcher())]
    for point, experiment in zip(grid, experiments, strict=True):
        _require_selectable(experiment)
        of_metric = experiment._replace(stated={**experiment.stated, OBJECTIVE: metric})
        require_metrics(of_metric, first_state(experiment))
        rule = f"be on the data of {grid[0].name}, whose test part has the scores"
        is_same = experiment.population is experiments[0].population
        checks.require(is_same, f"a trial of {point.name}", rule, "other data")
    planned = _common_cost(grid, experiments)
    for text in dict.fromkeys(text for each in experiments for text in large_deltas(each)):
        warn(text)
    drawn = _drawn(grid, output, trials, metric)
    jobs = {
        i: Job(loaded(study, grid[place]), output / f"trial-{i + 1:04d}")
        for i, place in enumerate(drawn)
    }
    labels = [f"[{i}/{len(drawn)}] {grid[place].name}" for i, place in enumerate(drawn, 1)]
    run_all(study, jobs, labels, report, cluster=cluster)
    summaries = [read_sealed_object(job.folder, SUMMARY_FILE) for job in jobs.values()]
    for job, summary in zip(jobs.values(), summaries, strict=True):
        rule = "have ended after its last round: a cost of other rounds was planned for all"
        checks.require(summary["ended"] == "finished", job.folder.name, rule, summary["ended"])
    if not drawn:
        return None
    values = [summary[metric] for summary in summaries]
    losses = [math.inf if value is None else loss_of(metric, value) for value in values]
    best = losses.index(min(losses))
    point, experiment = grid[drawn[best]], experiments[drawn[best]]
    folder = output / CHOSEN_FOLDER
    folder.mkdir(exist_ok=True)
    marks: dict[str, Mark] = {SETTING_FILE: "covered"}
    for file, mark in RELEASED.items():
        # Statement and summary of a trial have the ε of that trial alone.
        released = jobs[best].folder / RELEASE_FOLDER / file
        if released.is_file():
            shutil.copy(released, folder / file)
            marks[file] = mark
    write_json(folder / SETTING_FILE, point.values)
    claims = write_statement(
        folder,
        {unit: _of_choice(ledger, trials) for unit, ledger in planned.items()},
        experiment.dp_delta,
        experiment.config.privacy.accountant,
        _facts(experiment, trials, len(grid), metric),
        marks | dict.fromkeys(STATEMENT_FILES, "covered"),
    )
    epsilon = {claim["unit"]: float(claim["epsilon"]) for claim in claims}
    return Choice(jobs[best].folder, point, folder, epsilon)


def _require_selectable(experiment: Experiment) -> None:
    """Requires runs that may be released, of one length, and scored on public data."""
    section, name = experiment.config.run, "a private selection"
    rule = "have run.release = 'private' and run.secret = true, since the best trial's is published"
    checks.require(section.release is not None, name, rule, section.release)
    require_publishable(experiment, {})
    rule = "have no callbacks, which may end a trial by exact figures"
    checks.require(not section.callbacks, name, rule, list(section.callbacks))
    noise, rule = experiment.config.evaluation.noise_multiplier, "be none for a private selection"
    checks.require(noise is None, "evaluation.noise_multiplier", rule, noise)
    units = list(experiment.config.privacy.units)
    checks.require(bool(units), name, "choose among runs that claim privacy", units)
    of_all = experiment.evaluator.whole is not None and not experiment.evaluator.is_personal
    rule = "score a shared model on the data set's own test part, which clients do not hold"
    checks.require(of_all, name, rule, experiment.config.data.name)
    rule = "protect records alone where the test part has rows of clients: its score is exact"
    is_public = not (experiment.population.is_test_of_clients and "client" in units)
    checks.require(is_public, name, rule, units)
    accountant = experiment.config.privacy.accountant
    rule = "be an accountant by Rényi curves, which alone can analyse it"
    checks.require(accountant != "pld", "privacy.accountant", rule, accountant)


def _common_cost(grid: Sequence[Point], experiments: Sequence[Experiment]) -> Mapping[str, Ledger]:
    """Computes the cost of one trial; requires that of all points to be the same."""
    ledgers: list[dict[str, Ledger]] = []
    for point, experiment in zip(grid, experiments, strict=True):
        cohorts = experiment.simulation.federation.cohorts
        rule = "draw clients without chance, or charge all: a trial costs what its draws cost"
        checks.require(not _differs(cohorts), f"a trial of {point.name}", rule, cohorts.name)
        accounting = accounting_of(experiment, experiment.simulation.hyper)
        state, rounds = first_state(experiment), experiment.config.run.rounds
        # Of any root, as none decides who pays.
        ledgers.append(accounting.planned(state, jax.random.key(0), rounds))
    texts = [{unit: ledger.to_json() for unit, ledger in each.items()} for each in ledgers]
    for point, text in zip(grid, texts, strict=True):
        rule = f"cost what {grid[0].name} costs in every trial: the same noise, rates and rounds"
        checks.require(text == texts[0], f"a trial of {point.name}", rule, "another")
    return ledgers[0]


def _differs(cohorts: Cohorts) -> bool:
    """Whether the root of a run decides who pays for a round."""
    if cohorts.charges_all:
        return False
    draw = jax.make_jaxpr(cohorts.participation.draw)(jax.random.key(0), 0)
    return cohorts.own is not None or jaxprs.inputs_read(draw)[0]


def _drawn(
    grid: Sequence[Point], output: pathlib.Path, trials: Repetition, metric: str
) -> list[int]:
    """Draws the trials, or reads those that an interrupted selection has drawn."""
    file, names = output / TRIALS_FILE, [point.name for point in grid]
    asked = {"mean": trials.mean, "shape": repr(trials.shape), "points": names, "metric": metric}
    if file.is_file():
        saved = files.without_digest(files.parse_json(files.read_text(file), file), file)
        before = {name: saved.get(name) for name in asked}
        rule = f"be {before} as when the selection began"
        checks.require(before == asked, str(file), rule, asked)
        return list(saved["drawn"])
    drawn = [secrets.randbelow(len(grid)) for _ in range(trials.draw())]
    output.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.write_private(file, json.dumps(files.with_digest({**asked, "drawn": drawn})).encode())
    return drawn


def _of_choice(ledger: Ledger, trials: Repetition) -> Ledger:
    """Computes the ledger of the best of all trials from that of one."""
    total = Ledger(ledger.unit, ledger.relation, ledger.num_units)
    for units, event in ledger.histories():
        total.charge(trials.event(event), units=units)
    return total


def _facts(
    experiment: Experiment, trials: Repetition, points: int, metric: str
) -> dict[str, dict[str, Any]]:
    """Collects the facts of the statement."""
    facts = facts_of(
        experiment, experiment.simulation.hyper, ["all other trials, and their number"]
    )
    choice = {"score": metric, "points": points, "mean": trials.mean, "shape": trials.shape}
    # Each trial has a root of its own; and the server sees all of them, whatever one claims.
    own = {"choice": choice, "trust": "selection"}
    # A budget is that of one trial.
    left_out = ("deployment", "budget")
    return {
        unit: {k: v for k, v in each.items() if k not in left_out} | own
        for unit, each in public_facts(facts).items()
    }
