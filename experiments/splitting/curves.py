"""Runs methods on a convex problem, side by side, and keeps their models of every round."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from experiments.splitting.problems import Problem, problem_of
from fedjax_dp.algorithms import ProximalStep, schedules, splitting
from fedjax_dp.clients import LocalConfig, local_trainer
from fedjax_dp.data import participants, sampling
from fedjax_dp.engine import Layout, anderson, examples_of, federation

METHODS: Mapping[str, tuple[float, float, float]] = {
    "FedAvg": (1, 1, 1),
    "FedProx": (1, 1, 1),
    "FedRP": (2, 1, 1),
    "FedSplit": (2, 2, 1),
    "FedPi": (2, 2, 0.5),
}
# Of the steps that solve a proximal step, which are Nesterov's: about 1 / (L + 1/η).
INNER_RATE, MOMENTUM = {"ls": 9.4e-6, "lr": 2.2e-3}, 0.6


class Setting(NamedTuple):
    """What is static in a program; all else is a number.

    Attributes:
      problem: "ls" or "lr".
      sigma: noise of least squares.
      client_map: "gradient" or "prox".
      num_rounds: rounds.
      schedule: of the step size.
      period: of the exponential schedule, in rounds.
      memory: τ of the acceleration, 0 for none.
      participation: the chance that a client joins a round.
      batch_size: examples of a local step; all of a client where it is None.
    """

    problem: str
    sigma: float
    client_map: str
    num_rounds: int
    schedule: str = "constant"
    period: int | None = None
    memory: int = 0
    participation: float = 1.0
    batch_size: int | None = None


class Group(NamedTuple):
    """Curves that one call computes side by side.

    Attributes:
      name: of its file.
      figure: of the chapter.
      setting: the program.
      num_steps: local steps, or the most of them in a proximal step that is not exact.
      curves: numbers by label, of one set of names: `learning_rate` and those of the algorithm.
    """

    name: str
    figure: str
    setting: Setting
    num_steps: int
    curves: Mapping[str, Mapping[str, float]]


def run(group: Group) -> dict[str, dict[str, np.ndarray]]:
    """Runs a group.

    Args:
      group: the curves.

    Returns:
      For each label the `gap` of every round's model, and that of the `average` of all models so
      far, `[rounds]`; of schedules also that of the average of the `late` half of these models.
    """
    gaps, numbers = problem_in(group.setting).gaps, list(group.curves.values())
    columns = {name: np.float32([one[name] for one in numbers]) for name in numbers[0]}
    found = program(group.setting)(np.int32(group.num_steps), columns)
    points, averages = (np.asarray(x, np.float64) for x in found)
    curves = {
        label: {"gap": gaps(p), "average": gaps(a)}
        for label, p, a in zip(group.curves, points, averages, strict=True)
    }
    if group.figure == "2.5":
        steps = np.asarray(factors(group.setting), np.float64)
        for curve, models in zip(curves.values(), points, strict=True):
            curve["late"] = gaps(late_averages(models, steps))
    return curves


def curve_of(schedule: str, period: int | None) -> schedules.Curve:
    """The step of a round over that of the first."""
    return {
        "constant": schedules.constant(),
        "inverse": schedules.inverse(),
        "inverse_sqrt": schedules.inverse(power=0.5),
        "inverse_log10": schedules.inverse_log(base="10"),
        "exponential": schedules.exponential(every=period or 1, staircase=True),
    }[schedule]


def factors(setting: Setting) -> np.ndarray:
    """The steps of all rounds over that of the first, `[rounds]`."""
    curve = curve_of(setting.schedule, setting.period)
    return schedules.table_of(curve, setting.num_rounds, setting.schedule)


def late_averages(models: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Averages the later half of the models up to each round, weighted by step, `[rounds, p]`."""
    rounds = np.arange(len(models))
    weighted = np.concatenate([0 * models[:1], np.cumsum(steps[:, None] * models, axis=0)])
    weights = np.concatenate([[0.0], np.cumsum(steps)])
    first = (rounds + 1) // 2
    return (weighted[1:] - weighted[first]) / (weights[1:] - weights[first])[:, None]


def problem_in(setting: Setting) -> Problem:
    """The problem of a setting."""
    in_batches = setting.problem == "ls" and setting.batch_size is not None
    return problem_of(setting.problem, setting.sigma, in_batches=in_batches)


@functools.cache
def program(setting: Setting) -> Any:
    """Compiles `(num_steps, numbers by name [curves]) -> models, averages [curves, rounds, p]`."""
    problem = problem_in(setting)
    num_clients = problem.data.num_clients
    algorithm = _algorithm(setting)
    is_full = setting.participation == 1
    sampler = sampling.full_participation() if is_full else sampling.poisson()
    cohort = None if is_full else setting.participation * num_clients
    fed = federation(
        algorithm, problem.data, participants.participation(sampler, num_clients, cohort)
    )
    if setting.memory:
        fed = anderson(fed, memory=setting.memory, of="clients", num_rounds=setting.num_rounds)
    layout = Layout(num_clients, None)
    key, examples = jax.random.key(100), jax.device_put(examples_of(problem.data))

    def models(num_steps, numbers):
        own, hyper = dict(numbers), fed.hyper
        rate = own.pop("learning_rate", hyper.local.learning_rate)
        local = hyper.local._replace(learning_rate=rate, num_steps=num_steps)
        hyper = hyper._replace(local=local, algorithm={**hyper.algorithm, **own})
        if setting.schedule != "constant":
            # Inner steps that are stable in the first round are so in all: 1/rate grows as 1/η.
            shares = factors(setting)
            rates = 1 / (1 + rate * (1 / shares - 1) / own["step_size"])
            hyper = hyper._replace(
                factors={"algorithm.step_size": shares, "local.learning_rate": rates}
            )

        def body(state, _):
            state, _, _ = fed.run_round(state, hyper, examples, key, layout)
            server = state.server
            average = server.params if server.average is None else server.average.mean
            return state, (server.params, average)

        return jax.lax.scan(body, fed.init(key, layout), length=setting.num_rounds)[1]

    return jax.jit(jax.vmap(models, in_axes=(None, 0)))


def _algorithm(setting: Setting) -> Any:
    """Declares the scheme; the numbers that it is built with are replaced."""
    problem = problem_in(setting)
    size = setting.batch_size or int(problem.data.sizes.max())
    is_prox = setting.client_map == "prox"
    is_exact = setting.problem == "ls" and setting.batch_size is None
    step = ProximalStep()
    optimizer: Any = optax.sgd
    if is_prox and is_exact:
        step = step._replace(solver="exact")
    elif is_prox:
        step = step._replace(tolerance=0.0, smoothness=problem.smoothness)
        optimizer = functools.partial(optax.sgd, momentum=MOMENTUM, nesterov=True)
    rows = sampling.full_participation() if setting.batch_size is None else sampling.shuffled()
    config = LocalConfig(INNER_RATE[setting.problem], size, num_steps=1)
    return splitting(
        problem.model,
        local_trainer(
            problem.model, config, optimizer=optimizer, sampler=rows, micro_batch_size=size
        ),
        client_map=setting.client_map,  # type: ignore[arg-type]
        step=step,
        is_averaged=setting.memory == 0,
        form="centralised",
    )
