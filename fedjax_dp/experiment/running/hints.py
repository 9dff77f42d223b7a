"""What a private run could have done better, one line each."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.base import Hyper
from fedjax_dp.core import trees
from fedjax_dp.engine.accounts.calibration import priced_factors
from fedjax_dp.engine.wrappers.budgets import check_claim
from fedjax_dp.evaluation.noised import METRIC
from fedjax_dp.experiment.components.experiment import Experiment
from fedjax_dp.experiment.components.keeping import kept_metric
from fedjax_dp.experiment.components.noised import followed_in_rows, noised_accuracy_of
from fedjax_dp.experiment.components.planned import check_planned, planned_of
from fedjax_dp.experiment.components.wrappers import check_wrappers
from fedjax_dp.experiment.running.watcher import large_deltas
from fedjax_dp.experiment.schema.config import GaussianLevel

# Shares of clipped contributions from which on all of them count as clipped.
_ALL = 0.99
# The share of a budget below which it was used in part.
_USED = 0.9
# The number of categories of a column from which on it has many.
_MANY = 100
# Noise of an accuracy from which on differences of rounds are lost in it.
_COARSE = 0.1


class Hint(NamedTuple):
    """A line about a run.

    Attributes:
      about: the line, which begins with what it is about, such as a key.
      is_exact: whether it reads exact figures, which no ε covers; the line then says so. Others
        follow from released models, ledgers, sizes and the configuration.
    """

    about: str
    is_exact: bool

    @property
    def text(self) -> str:
        """The line, with what it reveals."""
        return f"{self.about} (exact, not private)" if self.is_exact else self.about


class Ran(NamedTuple):
    """A private run that has ended.

    Attributes:
      experiment: its parts.
      hyper: the numbers of its rounds.
      rows: the metrics of its rounds.
      epsilon: ε of each account, by unit.
      figures: the results of its last evaluation.
    """

    experiment: Experiment
    hyper: Hyper
    rows: Sequence[Mapping[str, Any]]
    epsilon: Mapping[str, np.ndarray]
    figures: Mapping[str, Any]

    @property
    def last(self) -> Hyper:
        """The numbers of its last round."""
        return self.hyper.at(max(0, len(self.rows) - 1))

    @property
    def units(self) -> tuple[str, ...]:
        """The units that are protected."""
        return self.experiment.config.privacy.units

    @property
    def sizes(self) -> np.ndarray:
        """The records of each client, which are public, `[num_clients]`."""
        return self.experiment.simulation.federation.population.sizes

    @property
    def num_steps(self) -> np.ndarray:
        """The local steps of each client in a round, `[num_clients]`."""
        count = self.experiment.simulation.algorithm.training.steps_of
        local = jax.tree.map(jnp.asarray, self.last.local)
        # One program, in place of one for each operation.
        steps = jax.jit(lambda ids, sizes: count(ids, sizes, local))
        return np.asarray(steps(np.arange(len(self.sizes)), self.sizes))


# The metric of clipped contributions of each unit, and the one that counts contributions.
_CLIPPED = {
    "record": ("clipped_example_share", "num_examples", "gradient of a record"),
    "client": ("clipped_client_share", "num_participants", "update of a client"),
}


def clip_norms(ran: Ran) -> Iterator[Hint]:
    """Finds bounds that no contribution reached, or nearly every one exceeded."""
    level = ran.experiment.config.privacy.client
    is_adaptive = isinstance(level, GaussianLevel) and level.adaptive_clipping
    for unit in ran.units:
        share, count, noun = _CLIPPED[unit]
        # Rounds without a contribution say nothing.
        found = [row[share] for row in ran.rows if row.get(count) and row.get(share) is not None]
        if not found or (unit == "client" and is_adaptive):
            continue
        clipped = f"{noun} was clipped in {len(found)} {'round' if len(found) == 1 else 'rounds'}"
        if max(found) == 0:
            text = f"no {clipped}; a smaller clip norm would mean less noise"
        elif min(found) >= _ALL:
            text = f"nearly every {clipped}; a larger clip norm would keep more of them, with more "
            text += "noise"
        else:
            continue
        yield Hint(f"privacy.{unit}.clip_norm: {text}", is_exact=True)


def noise_of_clients(ran: Ran) -> Iterator[Hint]:
    """Compares the noise of a mean with a typical update within the bound, if it has one."""
    clip_norm, federation = ran.experiment.client_clip_norm, ran.experiment.simulation.federation
    if clip_norm is None:
        return
    length = math.sqrt(trees.num_parameters(federation.facts.update))
    ratios = []
    for t, row in enumerate(ran.rows):
        quantiles, stddev = row.get("update_norm_quantiles"), row.get("noise_stddev")
        bound = float(ran.hyper.at(t).aggregator.get("clip_norm", clip_norm))
        typical = min(quantiles[2] or 0.0, bound) if quantiles else 0.0
        if stddev and typical > 0:
            ratios.append(stddev * length / typical)
    if ratios and (ratio := float(np.median(ratios))) > 1:
        text = (
            f"privacy.client: the noise of a round is {ratio:.3g} times as long as the median "
            "clipped update; more clients in a round, fewer parameters or a larger ε would lower "
            "that"
        )
        yield Hint(text, is_exact=True)


def noise_of_records(ran: Ran) -> Iterator[Hint]:
    """Compares the noise of a mean of models with the most that its clipped gradients can add.

    With noise z C / B in each of S steps, m models and d parameters: z sqrt(d) / (B sqrt(S m)).
    """
    experiment, local = ran.experiment, ran.last.local
    claim = experiment.simulation.algorithm.claims.record
    is_of_gradients = claim is not None and claim.contribution is None
    if not is_of_gradients or local.noise_multiplier is None or local.batch_size is None:
        return
    steps, m = ran.num_steps, experiment.simulation.participation.cohort_size
    noise, batch = (
        np.broadcast_to(np.asarray(x, float), steps.shape)
        for x in (local.noise_multiplier, local.batch_size)
    )
    has_steps = steps > 0
    if not np.any(has_steps):
        return
    each = noise / batch / np.sqrt(np.maximum(steps, 1) * m)
    ratio = float(np.median(each[has_steps])) * math.sqrt(experiment.num_parameters)
    if ratio > 1:
        text = (
            f"privacy.record: the noise of a round is at least {ratio:.3g} times as long as the "
            "mean update, if steps are plain; larger batches, more clients in a round, fewer "
            "parameters or a larger ε would lower that"
        )
        yield Hint(text, is_exact=False)


def large_delta(ran: Ran) -> Iterator[Hint]:
    """Finds δ that are not below the share of one unit."""
    yield from (Hint(text, is_exact=False) for text in large_deltas(ran.experiment))


def _can_plan(ran: Ran) -> bool:
    """Whether less noise may be calibrated, for the rounds that a client is drawn in."""
    config, simulation = ran.experiment.config, ran.experiment.simulation
    algorithm, level = simulation.algorithm, config.privacy.record
    asked, rounds = level.model_copy(update={"planned_participations": "q0.95"}), config.run.rounds
    privacy = config.privacy.model_copy(update={"record": asked})
    config = config.model_copy(update={"privacy": privacy})
    try:
        check_planned(config, simulation.participation)
        check_wrappers(config)
        check_claim(algorithm.claims.record, algorithm.name)
        is_less = (planned_of(asked, simulation.participation, rounds) or 0) < rounds
    except ValueError:
        return False
    is_free = level.planned_participations is None and "deployment" not in ran.experiment.stated
    return is_less and is_free and not priced_factors(algorithm, ran.sizes, ran.hyper.factors)


def budget_in_part(ran: Ran) -> Iterator[Hint]:
    """Finds budgets of which a part was left."""
    for unit, budget in ran.experiment.budget.items():
        spent = np.asarray(ran.epsilon[unit], float)
        allowed = np.broadcast_to(np.asarray(budget, float), spent.shape)
        counts = np.isfinite(allowed) & np.isfinite(spent)
        if unit == "record":
            counts &= ran.sizes > 0
        shares = (spent / allowed)[counts]
        if not shares.size or np.mean(shares) >= _USED:
            continue
        ends = dict.fromkeys(f"{100 * share:.0f} %" for share in (shares.min(), shares.max()))
        text = f"privacy.{unit}.epsilon: {' to '.join(ends)} of the budget was used"
        if unit == "record" and _can_plan(ran):
            text += (
                "; privacy.record.planned_participations = 'q0.95' calibrates less noise, for as "
                "many rounds as clients are drawn in"
            )
        yield Hint(text, is_exact=False)


def many_categories(ran: Ran) -> Iterator[Hint]:
    """Finds columns of which each of many categories has parameters of its own."""
    population = ran.experiment.population
    names = population.feature_names
    counts = Counter(name.partition("=")[0] for name in names if "=" in name)
    for column, count in counts.items():
        if count >= _MANY:
            text = (
                f"data: the column {column!r} has {count} categories, each with parameters of its "
                "own, which all get noise; merge rare ones, or leave it out of the features"
            )
            # Unless they were declared, they were read off the data.
            yield Hint(text, any(repr(column) in one for one in population.exact_statistics))


def without_a_step(ran: Ran) -> Iterator[Hint]:
    """Finds clients that take part and do nothing."""
    steps = ran.num_steps
    if (count := int(np.sum(steps == 0))) > 0:
        text = (
            f"training: {count} of {len(steps)} clients take no step in a round, for lack of "
            "records or by training.num_epochs and training.num_steps"
        )
        yield Hint(text, is_exact=False)


def noised_metric(ran: Ran) -> Iterator[Hint]:
    """Finds a noised metric that is paid for and decides nothing, or that noise decides."""
    config = ran.experiment.config
    noised = noised_accuracy_of(config)
    if noised is None:
        return
    key, count = "evaluation.noise_multiplier", sum(METRIC in row for row in ran.rows)
    if METRIC not in (kept_metric(config.run), *followed_in_rows(config).values()):
        text = f"{key}: {count} noised evaluations were released and charged, and no key follows "
        yield Hint(text + METRIC, is_exact=False)
    stddev = noised.noise_multiplier / len(ran.sizes)
    if stddev >= _COARSE:
        text = f"{key}: the noise of {METRIC} has a standard deviation of {stddev:.2g}; more "
        text += "clients, or more noise of rounds and less of evaluations, would make it smaller"
        yield Hint(text, is_exact=False)


def largest_class(ran: Ran) -> Iterator[Hint]:
    """Compares the shared model with one that predicts the largest class of the test records."""
    evaluator, population = ran.experiment.evaluator, ran.experiment.population
    of = "shared_test" if evaluator.is_personal else "test"
    accuracy = ran.figures.get(f"{of}_accuracy", math.nan)
    records = population.client_test if evaluator.whole is None else population.test
    if records is None or not population.has_class_labels or math.isnan(accuracy):
        return
    _, counts = np.unique(records.examples["y"], return_counts=True)
    size, count = records.num_examples, int(counts.max())
    if round(accuracy * size) <= count:
        text = f"accuracy: the shared model's, {accuracy:.4f}, is not above the share of the "
        yield Hint(f"{text}largest class of the test records, {count / size:.4f}", is_exact=True)


HINTS: tuple[Callable[[Ran], Iterator[Hint]], ...] = (
    clip_norms,
    noise_of_clients,
    noise_of_records,
    large_delta,
    budget_in_part,
    many_categories,
    without_a_step,
    noised_metric,
    largest_class,
)


def hints_of(ran: Ran) -> list[Hint]:
    """Collects what could have been better, where privacy was claimed at all."""
    return [hint for function in HINTS for hint in function(ran)] if ran.units else []
