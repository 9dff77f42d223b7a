"""Runs a problem through fedjax_dp: the parts that `fedjax-dp bench` uses, on given arrays.

A simulation computes in float32. With `--double` one step of its model is taken outside, by the
same lowered loss and, under record-level privacy, the same norms and sums by example.
"""

from session import Session  # isort: skip  (it takes standard output before anybody prints)

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from problem import Params, Problem

from fedjax_dp.algorithms import FederatedAlgorithm, dp_fedavg, dp_sgd, fedavg
from fedjax_dp.clients import LocalConfig, dp_sgd_trainer, local_trainer
from fedjax_dp.data import participants, sampling
from fedjax_dp.data.federated import FederatedData, example_structure
from fedjax_dp.engine import ExecutionConfig, simulation
from fedjax_dp.experiment.assembly.devices import offer_devices
from fedjax_dp.experiment.studies.workloads import WORKLOADS
from fedjax_dp.models import registry
from fedjax_dp.models.per_example import per_example
from fedjax_dp.privacy.mechanisms.clipping import clip_by_global_norm
from fedjax_dp.server.mean import uniform_mean
from fedjax_dp.server.private import gaussian_mean


class Ours:
    def __init__(self, problem: Problem):
        self.problem = problem
        self.x, self.y = problem.in_order()
        self.key = jax.random.key(0)
        self.simulation_of = functools.cache(self._simulation)

    def _simulation(self, num_clients: int) -> Any:
        problem = self.problem
        per_client = problem.num_steps * problem.batch_size
        examples = {
            "x": self.x[:num_clients].reshape(-1, *problem.x.shape[2:]),
            "y": self.y[:num_clients].reshape(-1),
        }
        data = FederatedData(examples, np.arange(num_clients + 1) * per_client)
        options = WORKLOADS[problem.name].model_options
        structure = example_structure(data)
        model = registry.build(problem.model, structure, problem.num_classes, **options)
        algorithm = _algorithm(problem, model, num_clients)
        participation = participants.participation(sampling.full_participation(), num_clients)
        execution = ExecutionConfig(rounds_per_call=1)
        return simulation(algorithm, data, participation, execution)

    def run(
        self, num_clients: int, num_steps: int, noise_multiplier: float
    ) -> tuple[float, Params]:
        built = self.simulation_of(num_clients)
        state = built.init(self.key)
        params, names = _filled(state.server.params, self.problem.params)
        local, aggregator = built.hyper.local._replace(num_steps=num_steps), built.hyper.aggregator
        if self.problem.unit == "record":
            local = local._replace(noise_multiplier=noise_multiplier)
        if self.problem.unit == "client":
            aggregator = {**aggregator, "noise_multiplier": noise_multiplier}
        hyper = built.hyper._replace(local=local, aggregator=aggregator)
        state = state._replace(server=state.server._replace(params=params))
        jax.block_until_ready(state)
        started = time.perf_counter()
        state, *_ = built.run(state, self.key, 1, hyper)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - started
        after = dict(zip(names, jax.tree.leaves(state.server.params), strict=True))
        return seconds, {k: np.asarray(after[k]) - v for k, v in self.problem.params.items()}


def _double(
    problem: Problem, num_clients: int, num_steps: int, noise: float
) -> tuple[float, Params]:
    """Takes one step, whatever is asked for, without noise."""
    del num_steps, noise
    x, y = problem.in_order()
    structure = {"x": jax.ShapeDtypeStruct(x.shape[3:], x.dtype)}
    options = WORKLOADS[problem.name].model_options
    model = registry.build(problem.model, structure, problem.num_classes, **options)
    params, names = _filled(jax.eval_shape(model.init, jax.random.key(0)), problem.params)

    def losses(params: Any, batch: Any) -> jax.Array:
        return model.losses(params, batch)[0]

    def gradient(params: Any, batch: Any) -> Any:
        if problem.unit != "record":
            return jax.grad(lambda p: jnp.mean(losses(p, batch)))(params)

        def loss(params: Any, example: Any) -> jax.Array:
            return losses(params, jax.tree.map(lambda a: a[None], example))[0]

        each = per_example(loss, params, batch)
        norms = jnp.sqrt(sum(n**2 for n in jax.tree.leaves(each.norms)))
        weights = jnp.minimum(1.0, problem.clip_norm / norms) / len(norms)
        return each.weighted_sum(jax.tree.map(lambda _: weights, params))

    started = time.perf_counter()
    first = [{"x": x[i, 0], "y": y[i, 0]} for i in range(num_clients)]
    step_of = jax.jit(gradient)
    gradients = [step_of(params, batch) for batch in first]
    deltas = [jax.tree.map(lambda g: -problem.learning_rate * g, g) for g in gradients]
    if problem.unit == "client":
        deltas = [clip_by_global_norm(delta, problem.clip_norm)[0] for delta in deltas]
    mean = jax.tree.map(lambda *leaves: np.asarray(sum(leaves) / num_clients), *deltas)
    return time.perf_counter() - started, dict(zip(names, jax.tree.leaves(mean), strict=True))


def _filled(params: Any, values: Params) -> tuple[Any, list[str]]:
    """Puts the problem's weights into the model's tree; also names its leaves in their order."""
    paths, structure = jax.tree_util.tree_flatten_with_path(params["params"])
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
    leaves = [jnp.array(values[name]) for name in names]
    return {"params": jax.tree.unflatten(structure, leaves)}, names


def _algorithm(problem: Problem, model: Any, num_clients: int) -> FederatedAlgorithm:
    config = LocalConfig(
        learning_rate=problem.learning_rate,
        batch_size=problem.batch_size,
        num_steps=problem.num_steps,
    )
    # The rows lie in the order in which they are read.
    sampler = sampling.full_participation() if problem.num_steps == 1 else sampling.cyclic()
    if problem.unit == "record":
        config = config._replace(clip_norm=problem.clip_norm, noise_multiplier=1.0)
        trainer = dp_sgd_trainer(model, config, sampler=sampler)
        return dp_sgd(model, trainer, aggregator=uniform_mean())
    trainer = local_trainer(model, config, sampler=sampler)
    if problem.clip_norm is None:
        return fedavg(model, trainer, aggregator=uniform_mean())
    return dp_fedavg(
        model,
        trainer,
        aggregator=gaussian_mean(
            clip_norm=problem.clip_norm, noise_multiplier=1.0, expected_cohort_size=num_clients
        ),
    )


def main() -> None:
    session = Session("jax", "jaxlib", "flax", "fedjax-dp")
    if session.problem.x.dtype == np.float64:
        session.serve(functools.partial(_double, session.problem))
    else:
        offer_devices("auto")
        session.serve(Ours(session.problem).run)


if __name__ == "__main__":
    main()
