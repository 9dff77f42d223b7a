"""Audits an experiment: attacks it and compares proven lower bounds with its claims."""

import math
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from fedjax_dp.algorithms import registry as algorithms
from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.audit.canaries import Planted, plant_clients, plant_records
from fedjax_dp.audit.canary_records import plant_losses, plant_votes
from fedjax_dp.audit.collusion import ATTACKS, CollusionResult, collusion
from fedjax_dp.audit.floats import check_norms
from fedjax_dp.audit.membership import (
    MembershipResult,
    attack_features,
    attack_model,
    membership_attack,
)
from fedjax_dp.audit.noise import StepCheck
from fedjax_dp.audit.runs import AuditResult, audit, run_audit
from fedjax_dp.audit.steps import check_choice, check_client, check_cohort, check_gradient_rule
from fedjax_dp.clients.gradients import clipped
from fedjax_dp.core import checks, masks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.products import computed_with
from fedjax_dp.core.ranges import Count, Positive, ProperFraction
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.client_store import stored_in
from fedjax_dp.engine.facts import examples_of
from fedjax_dp.engine.federation import federation
from fedjax_dp.engine.layout import ExecutionConfig
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.experiment.assembly.build import (
    build_algorithm,
    build_problem,
    build_trainer,
    record_level,
    setting_of,
)
from fedjax_dp.experiment.components.augmentation import augmentation_of
from fedjax_dp.experiment.components.experiment import Experiment
from fedjax_dp.experiment.components.mechanism import with_share_of_noise
from fedjax_dp.experiment.components.participation import participation_of
from fedjax_dp.experiment.components.schedules import with_schedules, without_wrappers
from fedjax_dp.experiment.components.secure_aggregation import graph_of
from fedjax_dp.experiment.schema.config import ObliviousLevel
from fedjax_dp.models.base import Model
from fedjax_dp.privacy.mechanisms.gamma_shares import gamma_shares
from fedjax_dp.privacy.sensitivities import sensitivity_of_sum
from fedjax_dp.server.oblivious import run_iteration, set_up_protocol

# The default number of canaries of a run.
_CANARIES = 100
# Records in a batch whose gradients are compared.
_BATCH = 4
# The most parties whose collusion is tried, and the most noise terms that they make.
_MOST_PARTIES, _MOST_TERMS = 200, 4_000_000
# Of noise that words hold.
_MOST_BITS = 50
# The most clients whose personal models are attacked, if the server has no model.
_MOST_CLIENTS = 20


class AuditReport(NamedTuple):
    """The results of an audit.

    Attributes:
      bounds: proven lower bounds, each with its claim.
      steps: comparisons on neighbouring data, by unit of privacy.
      membership: the attack on the model's outputs; None if it was not requested, or there is
        no model or no held-out data to attack.
      collusion: the attacks of all parties but one on oblivious noise, against which nothing is
        claimed; empty for other noise, or where they were not tried.
      no_collusion: why these attacks were not tried on oblivious noise, in words; empty if they
        were, and for other noise.
    """

    bounds: list[AuditResult]
    steps: dict[str, list[StepCheck]]
    membership: MembershipResult | None
    collusion: Sequence[CollusionResult] = ()
    no_collusion: str = ""

    @property
    def is_violated(self) -> bool:
        """Whether a lower bound exceeds its claim, or a step exceeds its stated bound."""
        steps = any(check.is_violated for each in self.steps.values() for check in each)
        return steps or any(bound.is_violated for bound in self.bounds)


@checked
def audit_experiment(
    experiment: Experiment,
    *,
    num_canaries: Count | None = None,
    num_runs: Count = 1,
    num_rounds: Count | None = None,
    confidence: ProperFraction = 0.95,
    has_membership: bool = True,
    records: Literal["made", "mislabelled"] = "made",
    noise_share: Positive = 1.0,
) -> AuditReport:
    """Audits an experiment at every unit of privacy that it claims.

    The population that trains is attacked, without clients that never take part, in all rounds; no
    round is chosen by `run.keep`.

    Args:
      experiment: the experiment.
      num_canaries: canaries of a run, at least 1 and at most one for each parameter of the model;
        None for 100, or fewer if the model is smaller.
      num_runs: runs; a single run audits all canaries together, several also one canary alone.
      num_rounds: rounds of a run; None for those of the experiment.
      confidence: joint confidence of the lower bounds of a unit, in (0, 1).
      has_membership: whether to train once more and attack the model's outputs.
      records: "made" canary records, whose gradient is a single entry, or "mislabelled" copies of
        records, which are learned by the model's own loss.
      noise_share: share of the claimed noise in the attacked runs, above 0; a share below 1 shows
        what an audit of this size can find, and runs canaries only.

    Returns:
      Bounds, comparisons on neighbouring data, and the membership attack.

    Raises:
      ValueError: if a number is out of range, or the experiment cannot be attacked.
    """
    config, most = experiment.config, experiment.num_parameters
    if num_canaries is None:
        num_canaries = min(_CANARIES, most)
    rule = f"be at most {most}, the number of parameters, one for each"
    checks.require(num_canaries <= most, "num_canaries", rule, num_canaries)
    num_rounds = config.run.rounds if num_rounds is None else num_rounds
    bounds: list[AuditResult] = []
    steps: dict[str, list[StepCheck]] = {}
    key = jax.random.key(config.run.seed)
    is_whole = noise_share == 1
    norms = check_norms(config.run.seed) if config.privacy.units and is_whole else []
    arithmetic = experiment.simulation.layout.arithmetic
    execution = ExecutionConfig(
        clients_per_chunk=config.execution.clients_per_chunk,
        devices=None,
        products=arithmetic.products,
    )
    # Before any runs: one unit may have no canaries.
    plants = {
        unit: _plant(experiment, unit, num_canaries, records) for unit in config.privacy.units
    }
    for place, (unit, planted) in enumerate(plants.items()):
        unit_key, running = jax.random.fold_in(key, place), None
        if is_whole:
            with computed_with(arithmetic):
                steps[unit] = _check_steps(experiment, unit, planted, unit_key) + norms
        else:
            running = _quieter(experiment, unit, planted, num_canaries, noise_share)
        seen = run_audit(
            planted,
            unit_key,
            num_runs=num_runs,
            num_rounds=num_rounds,
            execution=execution,
            running=running,
            wrapper=with_schedules(without_wrappers(config)),
        )
        bounds += audit(
            seen,
            # If clients have different δ, the one at which the most can be proven.
            float(np.max(experiment.dp_delta[unit])),
            accountant=config.privacy.accountant,
            confidence=confidence,
        )
    attack = _attack(experiment, key, num_rounds) if has_membership and is_whole else None
    return AuditReport(bounds, steps, attack, *_collude(experiment))


def _collude(experiment: Experiment) -> tuple[list[CollusionResult], str]:
    """Attacks an iteration of the protocol, in which all parties but one pool what they know.

    Each party holds a vector of the longest norm that a message may have, of random signs. Returns
    the results, and why none was tried on oblivious noise.
    """
    config, level = experiment.config, experiment.config.privacy.client
    if "client" not in config.privacy.units or not isinstance(level, ObliviousLevel):
        return [], ""
    numbers = experiment.simulation.hyper.aggregator
    multiplier = float(np.asarray(numbers["noise_multiplier"]))
    count = experiment.simulation.participation.min_drawn
    size = trees.num_parameters(experiment.simulation.federation.facts.update)
    if multiplier == 0:
        return [], "there is no noise, and all clients but one can compute what that one sent"
    if count > _MOST_PARTIES:
        return [], (
            f"a round has {count} clients, more than {_MOST_PARTIES}, and memory would hold the "
            "noise terms of all their pairs for too few entries of a message"
        )
    # Entries are alike, so that some of them are enough.
    shown = max(2, min(size, _MOST_TERMS // count**2))
    # In units of an entry, which fixed point holds whatever the clip norm is.
    noise = gamma_shares(
        count,
        sensitivity_of_sum(math.sqrt(size)),
        1 / multiplier,
        form=level.form,
        calibration=level.calibration,
        self_noise=level.self_noise,
    )
    rng = np.random.default_rng([config.run.seed, 9])
    values = rng.choice([-1.0, 1.0], (count, shown))
    bits = max(1, math.ceil(math.log2(1 + 40 * noise.scale)))
    if bits > _MOST_BITS:
        return [], "the noise is too large for words of 64 bits, in which messages are added"
    start = set_up_protocol(
        noise, config.run.seed, integer_bits=bits, fraction_bits=max(0, 40 - bits)
    )
    is_oblivious = level.form == "pairs"
    _, played = run_iteration(start, values, rng, is_oblivious=is_oblivious)
    kinds = [kind for kind in ATTACKS if (kind == "non_oblivious") != is_oblivious]
    kinds = kinds if is_oblivious else ["naive", *kinds]
    return [collusion(played, kind, rng) for kind in kinds], ""


def _sampling(experiment: Experiment) -> Participation:
    """Returns how clients are drawn; budgets leave no client out of the rounds of an audit."""
    config, bound = experiment.config, experiment.simulation.participation
    if "record" in config.privacy.units and config.privacy.record.planned_participations:
        return participation_of(config.participation, bound.num_clients)
    return bound


def _maker(experiment: Experiment) -> Callable[..., FederatedAlgorithm]:
    """Returns a builder of the algorithm for another model and other public inputs."""
    config, participation = experiment.config, _sampling(experiment)
    population, privacy = experiment.population, config.privacy
    graph = graph_of(config, participation)

    def make(model: Model, public_x: np.ndarray | None = None) -> FederatedAlgorithm:
        level = record_level(privacy)
        trainer = build_trainer(config.training, level, model, augmentation_of(config.data))
        setting = setting_of(config, participation, graph, model)
        asked = population if public_x is None else population._replace(public_x=public_x)
        problem = build_problem(config.algorithm, privacy, setting, asked)
        algorithm = build_algorithm(config.algorithm, privacy.unit, model, trainer, problem)
        # Audits the noise that was calibrated for the experiment.
        return algorithm.with_hyper(experiment.simulation.hyper)

    return make


def _without_masks(experiment: Experiment) -> FederatedAlgorithm:
    """Returns the algorithm whose sums are seen; a graph of masks would fit no other cohort."""
    if experiment.config.secure_aggregation.form is None:
        return experiment.simulation.algorithm
    return _maker(experiment)(experiment.model)


def _plant(experiment: Experiment, unit: str, count: int, records: str) -> Planted:
    """Plants canaries."""
    config, train = experiment.config, experiment.population.train
    participation = _sampling(experiment)
    rng = np.random.default_rng([config.run.seed, 7])
    relation = config.privacy.relation
    if unit == "client":
        algorithm = _without_masks(experiment)
        return plant_clients(algorithm, train, participation, count, rng, relation=relation)
    make, model = _maker(experiment), experiment.model
    asks_public_inputs = algorithms.ALGORITHMS[config.algorithm.name].asks_public_inputs
    if records == "mislabelled":
        rule = f"be 'made' for {config.algorithm.name}, whose clients send votes"
        checks.require(not asks_public_inputs, "records", rule, records)
        return plant_losses(make, model, train, participation, count, rng, relation=relation)
    if not asks_public_inputs:
        return plant_records(make, model, train, participation, count, rng, relation=relation)
    num_rounds = config.run.rounds
    return plant_votes(make, model, train, participation, count, num_rounds, rng, relation=relation)


def _quieter(
    experiment: Experiment, unit: str, planted: Planted, count: int, share: float
) -> FederatedAlgorithm:
    """Returns the attacked algorithm with a share of the noise of a unit."""
    config, hyper = experiment.config, planted.algorithm.hyper
    if unit == "record":
        local = hyper.local._replace(
            noise_multiplier=np.float32(share) * np.asarray(hyper.local.noise_multiplier)
        )
        own = dict(hyper.algorithm)
        if experiment.simulation.algorithm.stages.choice is not None and "selection_epsilon" in own:
            own["selection_epsilon"] = own["selection_epsilon"] / share
        return planted.algorithm.with_hyper(hyper._replace(local=local, algorithm=own))
    simulation, population = experiment.simulation, experiment.population
    participation = _sampling(experiment)
    graph = graph_of(config, participation)
    setting = setting_of(config, participation, graph, experiment.model)
    level = with_share_of_noise(config.privacy.client, setting, share)
    privacy = config.privacy.model_copy(update={"client": level})
    model, augmentation = experiment.model, augmentation_of(config.data)
    trainer = build_trainer(config.training, record_level(privacy), model, augmentation)
    problem = build_problem(config.algorithm, privacy, setting, population)
    algorithm = build_algorithm(config.algorithm, privacy.unit, experiment.model, trainer, problem)
    hyper = simulation.hyper._replace(aggregator=algorithm.hyper.aggregator)
    rng = np.random.default_rng([config.run.seed, 7])
    again = plant_clients(
        algorithm.with_hyper(hyper),
        population.train,
        participation,
        count,
        rng,
        relation=config.privacy.relation,
    )
    return again.algorithm


def _check_steps(experiment: Experiment, unit: str, planted: Planted, key: Any) -> list[StepCheck]:
    """Runs the grey-box checks of a unit."""
    config, train = experiment.config, experiment.population.train
    simulation = experiment.simulation
    if unit == "client":
        state = simulation.init(key)
        return check_cohort(_without_masks(experiment), train, state, key)
    owner = int(np.argmax(train.sizes))
    batch = jax.tree.map(lambda array: array[:_BATCH], train.client(owner))
    row = jax.tree.map(np.asarray, simulation.hyper.local.row(owner))
    rule = clipped(experiment.model, per_layer=config.privacy.record.per_layer)
    if (augmentation := augmentation_of(config.data)) is not None:
        rule = rule.augmented(augmentation)
    results = []
    if len(jax.tree.leaves(batch)[0]) > 1:
        results += check_gradient_rule(rule, experiment.model.init(key), batch, row, key)
        models = jax.vmap(experiment.model.init)(jax.random.split(key, 2))
        choice, numbers = simulation.algorithm.stages.choice, simulation.hyper.algorithm
        results += check_choice(choice, numbers, models, batch, key)
    is_sgd = config.training.optimizer == "sgd" and not config.training.optimizer_options
    if is_sgd:
        watched = federation(planted.algorithm, planted.data, planted.participation)
        results += check_client(planted, jax.jit(watched.init)(key), key)
    return results


def _attack(experiment: Experiment, key: Any, num_rounds: int) -> MembershipResult | None:
    """Trains once more and attacks the server's model, or else the clients'."""
    simulation, population = experiment.simulation, experiment.population
    others, shared = population.client_test or population.test, simulation.federation.shared
    if others is None or (shared is None and population.client_test is None):
        return None
    with tempfile.TemporaryDirectory() as folder:
        state = stored_in(simulation.init(key), folder)
        return _attacked(experiment, simulation.run(state, key, num_rounds)[0], others)


def _attacked(
    experiment: Experiment, state: SimulationState, others: FederatedData
) -> MembershipResult | None:
    """Attacks a trained state."""
    simulation, train = experiment.simulation, experiment.population.train
    shared, model = simulation.federation.shared, experiment.model
    rng = np.random.default_rng([experiment.config.run.seed, 8])
    if shared is not None:
        return attack_model(model, shared(state), train.examples, others.examples, rng)
    personal, held = simulation.federation.personal, examples_of(train)
    assert personal is not None
    sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    (clients,) = np.nonzero((train.sizes > 0) & (others.sizes > 0))
    for i in clients[:_MOST_CLIENTS]:
        params, _ = masks.parted(personal(state, held.client(int(i))))
        for side, data in zip(sides, (train, others), strict=True):
            side.append(attack_features(model, params, data.client(int(i))))
    return membership_attack(np.concatenate(sides[0]), np.concatenate(sides[1]), rng)
