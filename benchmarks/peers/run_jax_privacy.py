"""Runs a problem through jax-privacy: `clipped_grad` and its Gaussian noise, a jit call a step.

The variant is the micro-batch size; without one, a batch is one micro-batch.
"""

from session import Session  # isort: skip  (it takes standard output before anybody prints)

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax_models import mean_loss, network
from jax_privacy import noise_addition
from jax_privacy.clipping import clipped_grad
from problem import Params, Problem


class JaxPrivacy:
    def __init__(self, problem: Problem, variant: str):
        self.problem = problem
        self.x, self.y = jax.tree.map(jnp.asarray, problem.in_order())
        self.params = jax.tree.map(jnp.asarray, problem.params)
        gradient = clipped_grad(
            mean_loss(network(problem.model)),
            l2_clip_norm=problem.clip_norm,
            batch_argnums=(1, 2),
            normalize_by=problem.batch_size,
            microbatch_size=int(variant) if variant else None,
        )

        def step_with(noise_multiplier):
            stddev = noise_multiplier * gradient.sensitivity()
            privatizer = noise_addition.gaussian_privatizer(
                stddev=stddev, prng_key=jax.random.key(0)
            )

            @jax.jit
            def step(params, noise_state, x, y):
                noised, noise_state = privatizer.update(gradient(params, x, y), noise_state)
                rate = problem.learning_rate
                return jax.tree.map(lambda p, g: p - rate * g, params, noised), noise_state

            return privatizer, step

        self.noisy = step_with(problem.noise_multiplier)
        self.exact = step_with(0.0)

    def run(
        self, num_clients: int, num_steps: int, noise_multiplier: float
    ) -> tuple[float, Params]:
        privatizer, step = self.noisy if noise_multiplier else self.exact
        noise_state = privatizer.init(self.params)
        jax.block_until_ready((self.x, self.y, self.params))
        started = time.perf_counter()
        total = jax.tree.map(jnp.zeros_like, self.params)
        for client in range(num_clients):
            params = self.params
            for i in range(num_steps):
                params, noise_state = step(
                    params, noise_state, self.x[client, i], self.y[client, i]
                )
            total = jax.tree.map(lambda t, p, s: t + p - s, total, params, self.params)
        params = jax.tree.map(lambda p, t: p + t / num_clients, self.params, total)
        jax.block_until_ready(params)
        seconds = time.perf_counter() - started
        return seconds, {k: np.asarray(v) - self.problem.params[k] for k, v in params.items()}


def main() -> None:
    session = Session("jax-privacy", "jax", "jaxlib")
    session.serve(JaxPrivacy(session.problem, session.variant).run)


if __name__ == "__main__":
    main()
