"""Writes the results of a run: summary, privacy statement, plots, release."""

import importlib.util
import json
import pathlib
import threading
import tomllib
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.algorithms.base import FederatedAlgorithm, Hyper
from fedjax_dp.algorithms.registry import ALGORITHMS
from fedjax_dp.core.files import write_text
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.packages import PACKAGE, MissingPackageError, libraries, needed_for
from fedjax_dp.core.titles import title_of
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.accounts.privacy_accounting import unit_facts
from fedjax_dp.engine.evaluation import Evaluator
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.evaluation.evaluate import Evaluation, summarize
from fedjax_dp.evaluation.noised import METRIC
from fedjax_dp.experiment.components.catalogue import own_parts
from fedjax_dp.experiment.components.experiment import Experiment, Population
from fedjax_dp.experiment.components.keeping import kept_metric
from fedjax_dp.experiment.components.measured import RELEASED
from fedjax_dp.experiment.components.noised import noised_accuracy_of
from fedjax_dp.experiment.components.numbers_by_client import names_of
from fedjax_dp.experiment.components.participation import participation_of
from fedjax_dp.experiment.components.planned import planned_of, share_of
from fedjax_dp.experiment.components.schedules import described, exact_plateaus, over_rounds
from fedjax_dp.experiment.running.hints import Ran, hints_of
from fedjax_dp.experiment.running.release import (
    BY_CLIENT_FILE,
    PARTITION_FILE,
    STATED,
    exact_keys,
    marks_of,
    naming_files,
    partition_counts,
    read_exactly,
    write_release,
)
from fedjax_dp.experiment.running.run_folder import (
    CHECKPOINT_FOLDER,
    NODES_FILE,
    RELEASE_FOLDER,
    SUMMARY_FILE,
    is_deployed,
)
from fedjax_dp.experiment.running.starting import Start
from fedjax_dp.experiment.schema.config import DiscreteGaussianLevel, GaussianLevel
from fedjax_dp.io.checkpoint import ROOT_FILE
from fedjax_dp.io.digests import seal
from fedjax_dp.io.logbook import read_metrics, to_json, write_json
from fedjax_dp.io.statement import write_statement

# How a run ended: after its last round, or why before it.
Ended = Literal["finished", "interrupted", "budget", "callback"]
# The libraries that a privacy statement names.
_STATED = (PACKAGE, "jax", "dp-accounting")
# Numbers of local training of which a statement has the largest.
_BOUNDS = ("clip_norm", "batch_size")


def released(
    experiment: Experiment, num_rounds: int, parts: Mapping[str, Evaluation], key: PRNGKey
) -> dict[str, float]:
    """Releases the noised metric of an evaluation, if there is one after so many rounds."""
    noised = noised_accuracy_of(experiment.config)
    if noised is None or num_rounds % noised.every != 0:
        return {}
    own = fold(key, Purpose.NOISED_EVALUATION, num_rounds)
    return {METRIC: noised.release(own, parts["client_test"].client_accuracy)}


class Evaluated(NamedTuple):
    """Losses, accuracies and fairness of a state by name, and the parts with results by client."""

    figures: dict[str, Any]
    parts: dict[str, Evaluation]


def evaluate(evaluator: Evaluator, state: SimulationState, hyper: Hyper, seed: int) -> Evaluated:
    """Evaluates a state on all parts of the data."""
    # The seed is that of the run, never its secret root: no ε covers what evaluations draw.
    row: dict[str, Any] = {}
    parts: dict[str, Evaluation] = {}
    by_client = seen = None
    if evaluator.clients is not None:
        parts["client_test"] = by_client = evaluator.clients(state)
        row |= {"client_test_loss": by_client.loss, "client_test_accuracy": by_client.accuracy}
        row |= summarize(by_client)
        row["clients_without_test_data"] = int(np.sum(by_client.client_sizes == 0))
        row["test_accuracy"] = by_client.accuracy
        row["test_loss"] = by_client.loss
        row |= {f"client_test_{name}": value for name, value in by_client.metrics.items()}
        row |= {f"test_{name}": value for name, value in by_client.metrics.items()}
    if evaluator.whole is not None:
        whole, of = evaluator.whole(state), "shared_test" if evaluator.is_personal else "test"
        row |= {f"{of}_loss": whole.loss, f"{of}_accuracy": whole.accuracy}
        row |= {f"{of}_{name}": value for name, value in whole.metrics.items()}
    if evaluator.after_local is not None:
        after = evaluator.after_local(state, hyper, jax.random.key(seed))
        parts["client_test_after_local"] = after
        found = {"client_test_loss": after.loss, "client_test_accuracy": after.accuracy}
        found |= summarize(after)
        found |= {f"client_test_{name}": value for name, value in after.metrics.items()}
        row |= {f"{name}_after_local": value for name, value in found.items()}
    if evaluator.unseen is not None:
        parts["unseen"] = apart = evaluator.unseen(state)
        figures = {"loss": apart.loss, "accuracy": apart.accuracy}
        figures |= {**summarize(apart), **apart.metrics}
        row |= {f"unseen_{name}": value for name, value in figures.items()}
    if evaluator.training is not None:
        parts["training_set"] = seen = evaluator.training(state)
        row |= {"training_set_loss": seen.loss, "training_set_accuracy": seen.accuracy}
        row |= {f"training_set_{name}": value for name, value in seen.metrics.items()}
    if (clusters := evaluator.clusters) is not None:
        row |= clusters.hidden.metrics(clusters.assigned(state), by_client, seen)
    return Evaluated(row, parts)


def by_client_text(parts: Mapping[str, Evaluation], population: Population) -> str:
    """Returns a line of JSON for each client of each part, with its metrics and tables."""
    lines = []
    for part, found in parts.items():
        data = population.unseen if part == "unseen" else population.train
        assert data is not None
        columns = {"examples": found.client_sizes, "loss": found.client_loss}
        columns |= {"accuracy": found.client_accuracy, **found.client_metrics}
        for name, *values in zip(names_of(data), *columns.values(), strict=True):
            row = {"part": part, "client": name, **dict(zip(columns, values, strict=True))}
            lines.append(json.dumps(to_json(row)) + "\n")
    return "".join(lines)


def write_results(
    experiment: Experiment,
    state: SimulationState,
    start: Start,
    timing: dict[str, float],
    warnings: Sequence[str],
    ended: Ended = "finished",
    stopped_by: str | None = None,
    also_not_private: Sequence[str] = (),
    kept: SimulationState | None = None,
) -> dict[str, Any]:
    """Writes summary, statement and plots into the run folder, and the release if configured.

    A kept state is evaluated and drawn in place of the last one.
    """
    num_rounds, state = int(state.round), state if kept is None else kept
    folder, accounting = start.folder, start.accounting
    section = experiment.config.run
    # Damage was reported when the logbook was opened.
    rows = read_metrics(folder, lambda text: None)
    accountant = experiment.config.privacy.accountant
    spent = accounting.epsilon(experiment.claimed_delta, accountant)
    evaluated = evaluate(experiment.evaluator, state, start.hyper, section.seed)
    summary = _summary(experiment, state, evaluated.figures, spent, rows) | timing
    if kept is not None:
        summary |= {"rounds": num_rounds, "kept_round": int(kept.round)}
    summary |= {"communication": start.traffic.summary()}
    summary |= {"ended": ended, "stopped_by": stopped_by, "warnings": list(warnings)}
    if experiment.config.privacy.units:
        found = hints_of(Ran(experiment, start.hyper, rows, spent, evaluated.figures))
        summary |= {"hints": [hint.text for hint in found]}
    if section.plots:
        _draw(experiment, evaluated.parts.get("client_test"), rows, folder / "plots")
    write_text(folder / PARTITION_FILE, partition_text(experiment.population))
    if evaluated.parts:
        write_text(folder / BY_CLIENT_FILE, by_client_text(evaluated.parts, experiment.population))
    not_private = [partition_counts(folder), *also_not_private]
    facts = facts_of(experiment, start.hyper, not_private)
    naming = naming_files(tomllib.loads(start.text), experiment.population.train.client_names)
    marks = marks_of(folder, is_secret=section.secret, naming=naming)
    releases = section.release is not None and ended != "interrupted"
    if releases:
        marks[RELEASE_FOLDER] = "covered"
    if is_deployed(folder) and "record" in accounting.ledgers:
        # Nodes are asked for their claims once the run has ended.
        marks[NODES_FILE] = "secret"
    stated = (accounting.ledgers, experiment.dp_delta, accountant, facts, marks)
    claims = write_statement(folder, *stated)
    deltas = [delta for claim in claims for delta in claim["dp_delta_per_unit"]]
    summary |= {"dp_delta": max(deltas, default=None)}
    summary |= {"dp_delta_smallest": min(deltas, default=None)}
    summary |= {f"dp_delta_{each['unit']}": max(each["dp_delta_per_unit"]) for each in claims}
    summary |= _of_shared_records(claims)
    summary["not_private"] = exact_keys(summary, is_length_public=not also_not_private)
    # JSON has no infinity, and null would mean that nothing is claimed.
    infinite = {k: "inf" for k, v in summary.items() if k.startswith("epsilon") and v == np.inf}
    # Last: a release folder marks a finished run.
    if releases:
        write_release(experiment, state, accounting, folder, summary | infinite, facts)
    write_json(folder / SUMMARY_FILE, summary | infinite)
    seal(folder, [*STATED, PARTITION_FILE, BY_CLIENT_FILE])
    return summary


def _of_shared_records(claims: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns ε and δ of records that several clients hold."""
    found = [claim["shared_records"] for claim in claims if "shared_records" in claim]
    return {f"{k}_of_shared_record": each[k] for each in found for k in ("epsilon", "dp_delta")}


def _summary(
    experiment: Experiment,
    state: SimulationState,
    evaluated: Mapping[str, Any],
    spent: Mapping[str, np.ndarray],
    rows: list[dict[str, Any]],
) -> dict[str, Any]:
    algorithm = experiment.simulation.algorithm
    padding = [row["padding_share"] for row in rows if "padding_share" in row]
    summary = {
        "name": experiment.config.title,
        "algorithm": algorithm.name,
        **evaluated,
        "epsilon": max((float(np.max(each)) for each in spent.values()), default=None),
        **{f"epsilon_{unit}": float(np.max(each)) for unit, each in spent.items()},
        "rounds": int(state.round),
        "num_clients": experiment.population.train.num_clients,
        **_of_unseen(experiment),
        "num_parameters": experiment.num_parameters,
        "padding_share": float(np.mean(padding)) if padding else None,
        "clients_per_chunk": experiment.simulation.layout.chunk,
        **_of_products(experiment),
        **_of_updates(rows),
        **_of_last_ten(rows),
        **_of_noised(rows, int(state.round)),
        **_of_clock(rows),
    }
    summary |= {name: fact for name, fact in experiment.stated.items() if name != "trust"}
    is_own = has_personal_models(experiment)
    summary["test_accuracy_of"] = evaluated_models(experiment.evaluator.is_personal, is_own)
    if spent:
        has_shared = experiment.simulation.federation.shared is not None
        summary["covered_models"] = covered_models(
            experiment.evaluator.is_personal,
            is_own,
            has_shared,
            spent,
            algorithm.claims.not_covered,
        )
    if algorithm.claims.not_covered is not None:
        summary["not_covered"] = algorithm.claims.not_covered
    return summary


def evaluated_models(is_personal: bool, is_own: bool) -> str:
    """Names the models that `test_accuracy` evaluates."""
    if not is_personal:
        return "the shared model"
    return "the clients' own models" if is_own else "the models that clients choose"


def covered_models(
    is_personal: bool,
    is_own: bool,
    has_shared: bool,
    units: Collection[str],
    not_covered: str | None = None,
) -> str:
    """Names the models that ε covers, and those that it does not."""
    if not is_own:
        return "all models of the server" if is_personal else "the shared model"
    shared = "the shared model" if has_shared else "the server's part of the models"
    # What the claim for records leaves out may be these models.
    has_own = "record" in units and not_covered is None
    if has_own and "client" not in units:
        return ("the shared model and " if has_shared else "") + "the clients' own models"
    covered = f"{shared}, and not the clients' own models"
    return covered + (", which the ε of records alone covers" if has_own else "")


def _of_last_ten(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Averages accuracy over the last evaluations, since single ones vary."""
    values = [row["test_accuracy"] for row in rows if row.get("test_accuracy") is not None]
    return {"test_accuracy_last_ten": float(np.mean(values[-10:]))} if values else {}


def _of_noised(rows: list[dict[str, Any]], num_rounds: int) -> dict[str, float]:
    """Returns the noised metric that was released of a model, or before it."""
    found = [row[METRIC] for row in rows if METRIC in row and row["round"] <= num_rounds]
    return {METRIC: found[-1]} if found else {}


def _of_unseen(experiment: Experiment) -> dict[str, int]:
    """Counts the clients that never took part."""
    unseen = experiment.population.unseen
    return {} if unseen is None else {"num_unseen_clients": unseen.num_clients}


def _of_clock(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the simulated seconds of a run with a clock."""
    seconds = [row["simulated_seconds"] for row in rows if "simulated_seconds" in row]
    return {"simulated_seconds": seconds[-1]} if seconds else {}


def _of_products(experiment: Experiment) -> dict[str, str]:
    """Names how gradients of records were computed, if it was not exactly."""
    products = experiment.simulation.layout.arithmetic.products
    return {} if products == "exact" else {"products": products}


def _of_updates(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Averages figures of updates and noise over the rounds in which they are finite."""
    found = {
        "update_norm_median": [row.get("update_norm_quantiles", [None] * 3)[2] for row in rows]
    }
    for name in ("clipped_client_share", "noise_stddev", "bits_per_parameter"):
        found[name] = [row.get(name) for row in rows]
    known = {name: [v for v in values if v is not None] for name, values in found.items()}
    return {name: float(np.mean(values)) for name, values in known.items() if values}


def import_plots() -> None:
    """Imports what draws in a thread, while programs compile and run, if it is installed."""
    with needed_for("drawing", "plots"):
        if importlib.util.find_spec("matplotlib") is None:
            raise ModuleNotFoundError(name="matplotlib")
    work = partial(importlib.import_module, "fedjax_dp.io.plots")
    threading.Thread(target=work, name="imports").start()


def _draw(
    experiment: Experiment,
    found: Evaluation | None,
    rows: list[dict[str, Any]],
    folder: pathlib.Path,
) -> None:
    try:
        from fedjax_dp.io import plots
    except MissingPackageError:
        # The run has warned of it before its first round.
        return
    name = experiment.config.run.name or title_of(experiment.config.data.name)
    title = f"{name}: {title_of(experiment.simulation.algorithm.name)}"
    plots.save(plots.accuracy_and_epsilon(rows, title), folder / "accuracy_epsilon.png")
    plots.save(plots.accuracy_by_bytes(rows, title), folder / "accuracy_bytes.png")
    if any("simulated_seconds" in row for row in rows):
        plots.save(plots.accuracy_by_seconds(rows, title), folder / "accuracy_seconds.png")
    clock = experiment.clock
    if clock is not None and experiment.config.asynchronous.concurrency is None:
        times = clock.times(experiment.simulation.federation)
        names = names_of(experiment.population.train)
        label = f"{title}: a round of all clients, no jitter"
        plots.save(plots.round_chart(times, names, label), folder / "round.png")
    if any("update_norm_quantiles" in row for row in rows):
        bound = experiment.client_clip_norm
        if "aggregator.clip_norm" in experiment.simulation.hyper.factors:
            # A line would be that of one round.
            bound = None
        figure = plots.update_norms(rows, None if bound is None else float(bound), title)
        plots.save(figure, folder / "update_norms.png")
    if found is not None and np.isfinite(found.client_accuracy).any():
        train = experiment.population.train
        figure = plots.client_accuracies(
            found.client_accuracy,
            train.sizes,
            found.client_sizes,
            title,
            names=train.client_names,
        )
        plots.save(figure, folder / "client_accuracy.png")
    figure = plots.labels_by_client(experiment.population.statistics())
    plots.save(figure, folder / "partition.png")


def partition_text(population: Population) -> str:
    """Returns the text of `partition.txt`."""
    statistics, unseen = population.statistics(), population.unseen
    note = "These figures are exact: no ε covers them."
    apart = ""
    if unseen is not None:
        apart = "Clients that never take part, and are not in these figures: "
        apart += ", ".join(unseen.client_names)
    parts = (str(statistics), note, apart, statistics.by_client())
    return "\n\n".join(filter(None, parts)) + "\n"


def has_personal_models(experiment: Experiment) -> bool:
    """Returns whether client state holds a part of the model that the client uses."""
    simulation = experiment.simulation
    return has_own_models(simulation.algorithm, simulation.federation.facts.own)


def has_own_models(algorithm: FederatedAlgorithm, own: PyTree) -> bool:
    """Returns the same for client state of these shapes."""
    if own is None or algorithm.views.personal is None:
        return False
    # An index of a server model is not part of a model.
    return any(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(own))


def facts_of(
    experiment: Experiment, hyper: Hyper, also_not_private: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Returns by unit the facts of the statement besides the ledger, from the numbers that ran."""
    num_clients = experiment.population.train.num_clients

    def by_client(value: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, dtype=np.float64), num_clients)

    level = experiment.config.privacy.client
    is_adaptive = isinstance(level, GaussianLevel) and level.adaptive_clipping
    name = "initial_clip_norm" if is_adaptive else "clip_norm"
    common: dict[str, Any] = {
        "noise_root": "seed",
        "seed": experiment.config.run.seed,
        "versions": {n: v for n, v in libraries().items() if n in _STATED},
        "also_not_private": [
            *read_exactly(experiment),
            *_choice_in_sweep(experiment),
            *exact_plateaus(experiment.config),
            *_evaluated_on_unseen(experiment),
            *_choice_of_round(experiment),
            *also_not_private,
        ],
        "has_personal_models": has_personal_models(experiment),
        "has_client_states": experiment.simulation.algorithm.client_state is not None,
        "client_names": list(experiment.population.train.client_names),
    }
    if experiment.config.run.secret:
        file = f"{CHECKPOINT_FOLDER}/{ROOT_FILE}"
        common |= {"noise_root": "secret", "noise_root_file": file}
    # A statement may be published: folders of a user are no part of it.
    if parts := {pathlib.PurePath(name).name for name in own_parts(experiment.config)}:
        common["own_parts"] = sorted(parts)
    if hyper.factors:
        common["schedules"] = described(experiment.config, hyper)
    bound_of_clients = experiment.client_clip_norm
    if "aggregator.clip_norm" in hyper.factors:
        bound_of_clients = over_rounds(hyper, "aggregator.clip_norm")
    facts = {"client": {name: bound_of_clients} | common, "record": common.copy()}
    for unit, known in unit_facts(experiment.simulation.federation).items():
        facts[unit] |= {**known, "budget": experiment.budget.get(unit)}
    if (noised := noised_accuracy_of(experiment.config)) is not None:
        facts["client"]["noised_accuracy"] = noised._asdict()
    if isinstance(level, DiscreteGaussianLevel):
        # Every client adds its share of the noise; the server sees sums only.
        facts["client"]["trust"] = "secure_aggregation"
    if ALGORITHMS[experiment.config.algorithm.name].pools_clients:
        facts["record"]["trust"] = "pool"
    if hyper.local.clip_norm is not None:
        claim = experiment.simulation.algorithm.claims.record
        # Of the round that protects least.
        noise, _ = over_rounds(hyper, "local.noise_multiplier")
        clip_norm, batch_size = (over_rounds(hyper, f"local.{n}")[1] for n in _BOUNDS)
        bound = None if claim is None else claim.contribution
        facts["record"] |= (
            experiment.population.sharing._asdict()
            | {
                "not_covered": experiment.simulation.algorithm.claims.not_covered,
                "noise_multiplier_per_unit": by_client(noise),
            }
            # Of gradients, which are not released under noise on models.
            | (
                {
                    "clip_norm_per_unit": by_client(clip_norm),
                    "batch_size_per_unit": by_client(batch_size),
                }
                if bound is None
                else {"contribution": bound}
            )
        )
        record_level, run = experiment.config.privacy.record, experiment.config.run
        drawn = participation_of(experiment.config.participation, num_clients)
        if (planned := planned_of(record_level, drawn, run.rounds)) is not None:
            facts["record"]["planned"] = {"count": planned, "share": share_of(record_level)}
        elif record_level.noise_multiplier is None:
            facts["record"]["assumes_every_round"] = True
    return {unit: each | _stated(experiment, unit) for unit, each in facts.items()}


def _choice_of_round(experiment: Experiment) -> list[str]:
    """Names the choice of the round whose model a run keeps."""
    metric = kept_metric(experiment.config.run)
    if metric is None or metric in RELEASED:
        return []
    return [f"the choice of the round whose model was kept, by the exact {metric}"]


def _evaluated_on_unseen(experiment: Experiment) -> list[str]:
    """Names the records of clients that never take part, which are in no claim."""
    unseen = experiment.population.unseen
    if unseen is None:
        return []
    return [
        f"the {unseen.num_examples} records of {unseen.num_clients} clients that never took part, "
        "on which models were evaluated exactly"
    ]


def _choice_in_sweep(experiment: Experiment) -> list[str]:
    """Names the choices of a sweep, which the statement of one run does not cover."""
    count, engine = experiment.stated.get("sweep"), experiment.stated.get("search")
    texts = (
        [] if count is None else [f"the choice of this run among the {count} or more of a sweep"]
    )
    if engine is not None:
        texts.append(f"the setting of this run, which {engine} chose by the results of other runs")
    return texts


def _stated(experiment: Experiment, unit: str) -> dict[str, Any]:
    """Returns the facts of masks and deployment; only clients add shares of noise."""
    stated = experiment.stated
    return {k: v for k, v in stated.items() if unit == "client" or k != "trust"}
