"""`fedjax-dp audit`: attacks an experiment and puts what that proves beside what is claimed."""

import json
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from fedjax_dp.algorithms import registry as algorithms
from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.audit.canaries import Planted
from fedjax_dp.audit.choices import check_choice
from fedjax_dp.audit.clients import plant_clients
from fedjax_dp.audit.local import check_client
from fedjax_dp.audit.membership import (
    MembershipResult,
    attack_features,
    attack_model,
    membership_attack,
)
from fedjax_dp.audit.noise import StepCheck
from fedjax_dp.audit.records import plant_records
from fedjax_dp.audit.runs import AuditResult, audit, run_audit
from fedjax_dp.audit.steps import check_cohort, check_gradient_rule
from fedjax_dp.audit.votes import plant_votes
from fedjax_dp.cli import assemble as assembly
from fedjax_dp.cli import config as configuration
from fedjax_dp.cli.assemble import Experiment
from fedjax_dp.clients.base import ClientData
from fedjax_dp.clients.gradients import clipped
from fedjax_dp.clients.selection import make_choice
from fedjax_dp.core import checks, trees
from fedjax_dp.engine.execution import ExecutionConfig
from fedjax_dp.engine.simulate import simulation as compile_simulation
from fedjax_dp.models.base import Model

# Records of a batch on which gradients are compared.
_BATCH = 4
# Clients whose own models are attacked, where the server has none.
_MOST_CLIENTS = 20


def command(
    context: typer.Context,
    canaries: Annotated[int, typer.Option(help="Canaries of a run, at least 1.")] = 100,
    runs: Annotated[
        int, typer.Option(help="Runs; one audits all canaries, many audit one canary too.")
    ] = 1,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of a run; those of the experiment if not given.")
    ] = None,
    confidence: Annotated[
        float, typer.Option(help="How sure the lower bounds of a unit are together.")
    ] = 0.95,
    membership: Annotated[
        bool, typer.Option(help="Train once more and attack the model's outputs.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Audit an experiment: `fedjax-dp audit [FILE.toml] [--section.key VALUE ...]`.

    The exit status is 1 where more was proven than claimed, or a step does not hold what it states.
    """
    words = list(context.args)
    file = words.pop(0) if words and not words[0].startswith("--") else None
    config = configuration.load(file, words)
    checks.whole("--canaries", canaries)
    checks.whole("--runs", runs)
    checks.require(0 < confidence < 1, "--confidence", "lie in (0, 1)", confidence)
    num_rounds = config.run.rounds if rounds is None else rounds
    checks.whole("--rounds", num_rounds)
    experiment = assembly.assemble(config)
    steps: dict[str, list[StepCheck]] = {}
    bounds: list[AuditResult] = []
    key = jax.random.key(config.run.seed)
    for unit in config.privacy.units:
        unit_key = jax.random.fold_in(key, len(steps))
        planted = _plant(experiment, unit, canaries)
        steps[unit] = _check_steps(experiment, unit, planted, unit_key)
        seen = run_audit(
            planted, unit_key, runs, num_rounds, execution=_execution(experiment.config)
        )
        bounds += audit(
            seen,
            # Where clients chose their own, the δ at which most can be proven.
            float(np.max(experiment.dp_delta[unit])),
            accountant=config.privacy.accountant,
            confidence=confidence,
        )
    attack = _attack(experiment, key, num_rounds) if membership else None
    is_violated = any(bound.is_violated for bound in bounds) or any(
        check.is_violated for checks_ in steps.values() for check in checks_
    )
    if as_json:
        print(json.dumps(_plain(bounds, steps, attack, is_violated)))
    else:
        _show(Console(), bounds, steps, attack, is_violated)
    raise typer.Exit(1 if is_violated else 0)


def _execution(config: configuration.Config) -> ExecutionConfig:
    return ExecutionConfig(clients_per_chunk=config.execution.clients_per_chunk, devices=None)


def _maker(experiment: Experiment) -> Callable[..., FederatedAlgorithm]:
    """Builds the experiment's algorithm for another model, and other public inputs if given."""
    config, participation = experiment.config, experiment.simulation.participation
    population = experiment.population

    def make(model: Model, public_x: np.ndarray | None = None) -> FederatedAlgorithm:
        trainer = assembly.build_trainer(config, model, population.train.sizes)
        # The noise that was calibrated for the experiment is what is audited.
        trainer = trainer._replace(config=experiment.simulation.algorithm.config)
        public_x = population.public_x if public_x is None else public_x
        return assembly.build_algorithm(config, model, trainer, participation, public_x)

    return make


def _plant(experiment: Experiment, unit: str, num_canaries: int) -> Planted:
    """Plants canaries."""
    config, train = experiment.config, experiment.population.train
    participation = experiment.simulation.participation
    rng = np.random.default_rng([config.run.seed, 7])
    count = min(num_canaries, experiment.num_parameters)
    relation = config.privacy.relation
    if unit == "client":
        algorithm = experiment.simulation.algorithm
        return plant_clients(algorithm, train, participation, count, rng, relation=relation)
    make, model = _maker(experiment), experiment.model
    if algorithms.ALGORITHMS[config.algorithm.name].sends_model:
        return plant_records(make, model, train, participation, count, rng, relation=relation)
    num_rounds = config.run.rounds
    return plant_votes(make, model, train, participation, count, num_rounds, rng, relation=relation)


def _check_steps(experiment: Experiment, unit: str, planted: Planted, key: Any) -> list[StepCheck]:
    """Runs the grey-box checks of a unit."""
    config, train = experiment.config, experiment.population.train
    simulation = experiment.simulation
    if unit == "client":
        state = simulation.init(key)
        return check_cohort(simulation.algorithm, train, state, key)
    owner = int(np.argmax(train.sizes))
    batch = {name: array[:_BATCH] for name, array in train.client(owner).items()}
    row = jax.tree.map(np.asarray, simulation.algorithm.config.row(owner))
    rule = clipped(experiment.model, per_layer=config.privacy.record.per_layer)
    results = []
    if len(batch["x"]) > 1:
        results += check_gradient_rule(rule, experiment.model.init(key), batch, row, key)
    options = algorithms.options_of(config.algorithm.name) | config.algorithm.options
    if "selection_epsilon" in options:
        names = ("selection", "selection_epsilon", "score", "loss_bound")
        choice = make_choice(experiment.model, *(options[name] for name in names))
        models = jax.vmap(experiment.model.init)(jax.random.split(key, 2))
        results += check_choice(choice, models, batch, key) if len(batch["x"]) > 1 else []
    is_sgd = config.training.optimizer == "sgd" and not config.training.optimizer_options
    if is_sgd:
        watched = compile_simulation(planted.algorithm, planted.data, planted.participation)
        results += check_client(planted, watched.init(key), key)
    return results


def _attack(experiment: Experiment, key: Any, num_rounds: int) -> MembershipResult | None:
    """Trains as the experiment would, and attacks the server's model, or the clients' own."""
    simulation, population = experiment.simulation, experiment.population
    algorithm, model, train = simulation.algorithm, experiment.model, population.train
    others = population.client_test or population.test
    if others is None or (algorithm.model_of is None and population.client_test is None):
        return None
    state, _ = simulation.run(simulation.init(key), key, num_rounds)
    rng = np.random.default_rng([experiment.config.run.seed, 8])
    if algorithm.model_of is not None:
        params = algorithm.model_of(state.server)
        return attack_model(model, params, train.examples, others.examples, rng)
    personal, limit = algorithm.personal_model_of, simulation.shape.limit
    assert personal is not None
    examples = {name: jnp.asarray(array) for name, array in train.examples.items()}
    sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    (clients,) = np.nonzero((train.sizes > 0) & (others.sizes > 0))
    for i in clients[:_MOST_CLIENTS]:
        index, start, size = (jnp.int32(x) for x in (i, train.offsets[i], train.sizes[i]))
        row = None if state.rows is None else trees.take(state.rows, index)
        params = personal(state.server, row, ClientData(examples, start, size, index, limit=limit))
        for side, data in zip(sides, (train, others), strict=True):
            side.append(attack_features(model, params, data.client(int(i))))
    return membership_attack(np.concatenate(sides[0]), np.concatenate(sides[1]), rng)


def _plain(
    bounds: list[AuditResult],
    steps: dict[str, list[StepCheck]],
    attack: MembershipResult | None,
    is_violated: bool,
) -> dict[str, Any]:
    def number(value: Any) -> Any:
        is_odd = isinstance(value, float) and not np.isfinite(value)
        return repr(value) if is_odd else value

    def fields(value: Any) -> dict[str, Any]:
        return {name: number(entry) for name, entry in value._asdict().items()}

    return {
        "is_violated": is_violated,
        "bounds": [fields(bound) | {"is_violated": bound.is_violated} for bound in bounds],
        "steps": [
            {"unit": unit} | fields(check) | {"is_violated": check.is_violated}
            for unit, results in steps.items()
            for check in results
        ],
        "membership": None if attack is None else fields(attack),
    }


def _show(
    console: Console,
    bounds: list[AuditResult],
    steps: dict[str, list[StepCheck]],
    attack: MembershipResult | None,
    is_violated: bool,
) -> None:
    def verdict(result: AuditResult | StepCheck) -> str:
        return "VIOLATED" if result.is_violated else "holds"

    if bounds:
        table = Table("unit", "method", "δ", "proven ε ≥", "claimed ε ≤", "confidence", "")
        for b in bounds:
            numbers = (b.dp_delta, b.epsilon_lower, b.epsilon_claimed, b.confidence)
            table.add_row(b.unit, b.method, *(f"{x:.4g}" for x in numbers), verdict(b))
        console.print(table)
    if steps:
        table = Table("unit", "step on neighbouring data", "measured", "allowed", "")
        for unit, results in steps.items():
            for s in results:
                table.add_row(unit, s.name, f"{s.measured:.6g}", f"{s.allowed:.6g}", verdict(s))
        console.print(table)
    if attack is not None:
        low, high = attack.accuracy_interval
        console.print(
            f"membership attack on outputs: accuracy {attack.accuracy:.3f} "
            f"({low:.3f} to {high:.3f}; guessing is 0.5), AUC {attack.auc:.3f}, "
            f"{attack.true_positive_rate:.3f} of members found at 1 % false alarms"
        )
    if not bounds and not steps:
        console.print("no privacy is claimed: there is nothing to hold the run to")
    elif is_violated:
        console.print("more was proven than claimed, or a step does not hold what it states")
    else:
        console.print("nothing was proven beyond what is claimed; that is no proof of privacy")
