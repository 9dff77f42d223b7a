"""Runs a problem through FedJAX: `for_each_client` with its jit backend, as its FedAvg does.

FedJAX 0.0.17 calls `jax.tree_map`, a name that JAX has removed; it is put back before the import,
and nothing else is changed.
"""

from session import Session  # isort: skip  (it takes standard output before anybody prints)

import time
from functools import partial

import jax

jax.tree_map = jax.tree.map

import fedjax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from fedjax.core import tree_util  # noqa: E402
from jax_models import mean_loss, network  # noqa: E402
from problem import Params, Problem  # noqa: E402


class FedJax:
    def __init__(self, problem: Problem):
        self.problem = problem
        x, y = problem.in_order()
        per_client = problem.num_steps * problem.batch_size
        self.clients = [
            fedjax.ClientDataset(
                {
                    "x": x[i].reshape(per_client, *x.shape[3:]),
                    "y": y[i].reshape(per_client),
                }
            )
            for i in range(problem.num_clients)
        ]
        self.params = jax.tree.map(jnp.asarray, problem.params)
        loss = mean_loss(network(problem.model))
        optimizer = fedjax.optimizers.sgd(problem.learning_rate)

        def client_init(server_params, client_input):
            return {"params": server_params, "opt_state": optimizer.init(server_params)}

        def client_step(state, batch):
            gradient = jax.grad(loss)(state["params"], batch["x"], batch["y"])
            opt_state, params = optimizer.apply(gradient, state["opt_state"], state["params"])
            return {"params": params, "opt_state": opt_state}

        def client_final(server_params, state):
            delta = jax.tree.map(jnp.subtract, state["params"], server_params)
            if problem.unit == "client":
                delta = tree_util.tree_clip_by_global_norm(delta, problem.clip_norm)
            return delta

        fedjax.set_for_each_client_backend("jit")
        self.train = fedjax.for_each_client(client_init, client_step, client_final)

    def run(
        self, num_clients: int, num_steps: int, noise_multiplier: float
    ) -> tuple[float, Params]:
        problem = self.problem
        per_client = num_steps * problem.batch_size
        jax.block_until_ready(self.params)
        started = time.perf_counter()
        clients = [
            (i, client[:per_client].batch(batch_size=problem.batch_size), ())
            for i, client in enumerate(self.clients[:num_clients])
        ]
        total = tree_util.tree_zeros_like(self.params)
        for _, delta in self.train(self.params, clients):
            total = tree_util.tree_add(total, delta)
        mean = tree_util.tree_inverse_weight(total, num_clients)
        if problem.unit == "client":
            stddev = noise_multiplier * problem.clip_norm / num_clients
            mean = _noised(mean, jax.random.PRNGKey(0), stddev)
        params = jax.block_until_ready(tree_util.tree_add(self.params, mean))
        seconds = time.perf_counter() - started
        return seconds, {k: np.asarray(v) - problem.params[k] for k, v in params.items()}


@partial(jax.jit)
def _noised(tree, key, stddev):
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    noised = [v + stddev * jax.random.normal(k, v.shape) for k, v in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, noised)


def main() -> None:
    session = Session("fedjax", "jax", "jaxlib")
    session.serve(FedJax(session.problem).run)


if __name__ == "__main__":
    main()
