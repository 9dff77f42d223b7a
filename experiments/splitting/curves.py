"""Runs one method on a convex problem and keeps its model of every round."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.splitting.problems import Problem
from fedjax_dp.algorithms import splitting
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


class Setting(NamedTuple):
    """What is static in a program; all else is a number.

    Attributes:
      client_map: "gradient" or "prox".
      num_rounds: rounds.
      num_steps: local steps, or the most of them in a proximal step that is not exact.
      schedule: of the step size.
      period: of the exponential schedule, in rounds.
      memory: τ of the acceleration, 0 for none.
      participation: the chance that a client joins a round.
      batch_size: examples of a local step; all of a client where it is None.
    """

    client_map: str
    num_rounds: int
    num_steps: int = 1
    schedule: str = "constant"
    period: int | None = None
    memory: int = 0
    participation: float = 1.0
    batch_size: int | None = None


def run(
    problem: Problem, setting: Setting, settings: list[Mapping[str, float]]
) -> list[dict[str, np.ndarray]]:
    """Runs several settings of the numbers side by side.

    Args:
      problem: what is minimised.
      setting: the program.
      settings: numbers by name, `learning_rate` and those of the algorithm; of one set of names.

    Returns:
      For each the `gap` of every round's model, and that of the `average`, `[rounds]`.
    """
    data, num_clients = problem.data, problem.data.num_clients
    size = int(data.sizes.max())
    is_exact = problem.name == "ls" and setting.client_map == "prox"
    largest = max(numbers.get("learning_rate", 1e-9) for numbers in settings)
    config = LocalConfig(largest, setting.batch_size or size, num_steps=setting.num_steps)
    options: dict[str, Any] = {}
    if setting.client_map == "prox":
        options = {"step_size": max(numbers["step_size"] for numbers in settings)}
        if is_exact:
            options["solver"] = "exact"
        else:
            options["smoothness"] = problem.smoothness
            options["tolerance"] = 1e-4 if setting.batch_size is None else 0.0
    rows = sampling.everybody() if setting.batch_size is None else sampling.shuffled()
    trainer = local_trainer(problem.model, config, sampler=rows, micro_batch_size=size)
    algorithm = splitting(
        problem.model,
        trainer,
        client_map=setting.client_map,  # type: ignore[arg-type]
        schedule=setting.schedule,  # type: ignore[arg-type]
        period=setting.period,
        is_averaged=setting.memory == 0,
        form="centralised",
        **options,
    )
    is_full = setting.participation == 1
    sampler = sampling.everybody() if is_full else sampling.poisson()
    cohort = None if is_full else setting.participation * num_clients
    who = participants.participation(sampler, num_clients, cohort)
    fed = federation(algorithm, data, who)
    if setting.memory:
        fed = anderson(fed, memory=setting.memory, of="clients", num_rounds=setting.num_rounds)
    fed = fed.laid_out(Layout(num_clients, None))
    key, examples = jax.random.key(100), jax.device_put(examples_of(data))
    names = list(settings[0])

    def models(numbers):
        own = dict(zip(names, numbers, strict=True))
        hyper = fed.hyper
        if "learning_rate" in own:
            local = hyper.local._replace(learning_rate=own.pop("learning_rate"))
            hyper = hyper._replace(local=local)
        hyper = hyper._replace(algorithm={**hyper.algorithm, **own})

        def body(state, _):
            state, _, _ = fed.step(state, hyper, examples, key)
            server = state.server.inner if setting.memory else state.server
            average = server.params if server.average is None else server.average.mean
            return state, (server.params, average)

        return jax.lax.scan(body, fed.init(key), length=setting.num_rounds)[1]

    columns = [np.float32([numbers[name] for numbers in settings]) for name in names]
    found = jax.jit(jax.vmap(models))(columns)
    points, averages = (np.asarray(x, np.float64) for x in found)
    return [
        {"gap": problem.gaps(p), "average": problem.gaps(a)}
        for p, a in zip(points, averages, strict=True)
    ]
