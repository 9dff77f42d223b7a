"""Runs a problem through DrJAX: one jitted program that maps over the clients' placement."""

from session import Session  # isort: skip  (it takes standard output before anybody prints)

import functools
import time

import drjax
import jax
import jax.numpy as jnp
import numpy as np
from jax_models import mean_loss, network
from problem import Params, Problem


class DrJax:
    def __init__(self, problem: Problem):
        self.problem = problem
        self.x, self.y = jax.tree.map(jnp.asarray, problem.in_order())
        self.params = jax.tree.map(jnp.asarray, problem.params)
        self.program_of = functools.cache(self._program)

    def _program(self, num_clients: int):
        problem = self.problem
        loss = mean_loss(network(problem.model))

        def train(start, x, y):
            params = start
            # Unrolled: convolutions in the body of a loop are slower still.
            for i in range(x.shape[0]):
                gradient = jax.grad(loss)(params, x[i], y[i])
                params = jax.tree.map(lambda p, g: p - problem.learning_rate * g, params, gradient)
            delta = jax.tree.map(jnp.subtract, params, start)
            if problem.unit == "client":
                norm = jnp.sqrt(sum(jnp.sum(d**2) for d in jax.tree.leaves(delta)))
                factor = jnp.minimum(1.0, problem.clip_norm / norm)
                delta = jax.tree.map(lambda d: d * factor, delta)
            return delta

        @jax.jit
        @drjax.program(placements={"clients": num_clients})
        def one_round(params, x, y, key, stddev):
            started = drjax.broadcast(params)
            mean = drjax.reduce_mean(drjax.map_fn(train, (started, x, y)))
            if problem.unit == "client":
                keys = dict(zip(mean, jax.random.split(key, len(mean)), strict=True))
                mean = {
                    k: v + stddev * jax.random.normal(keys[k], v.shape) for k, v in mean.items()
                }
            return jax.tree.map(jnp.add, params, mean)

        return one_round

    def run(
        self, num_clients: int, num_steps: int, noise_multiplier: float
    ) -> tuple[float, Params]:
        problem = self.problem
        one_round = self.program_of(num_clients)
        x, y = self.x[:num_clients, :num_steps], self.y[:num_clients, :num_steps]
        stddev = noise_multiplier * (problem.clip_norm or 0.0) / num_clients
        jax.block_until_ready((x, y, self.params))
        started = time.perf_counter()
        params = jax.block_until_ready(
            one_round(self.params, x, y, jax.random.key(0), np.float32(stddev))
        )
        seconds = time.perf_counter() - started
        return seconds, {k: np.asarray(v) - problem.params[k] for k, v in params.items()}


def main() -> None:
    session = Session("drjax", "jax", "jaxlib")
    session.serve(DrJax(session.problem).run)


if __name__ == "__main__":
    main()
