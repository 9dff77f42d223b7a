"""Computes what every implementation should compute: a plain step loop in float64.

    python benchmarks/peers/reference.py PROBLEM.npz --clients n --output FILE.npz

Nothing of fedjax_dp is used: the networks are those of `jax_models.py`, one jitted gradient is
called for each step, or for each example under record-level privacy, and clipping and averaging are
NumPy. Writes the mean delta after one step and after all steps, without noise.
"""

import argparse

import jax
import numpy as np
from jax_models import mean_loss, network
from problem import Params, Problem, load, save_delta


def deltas(problem: Problem) -> dict[int, Params]:
    """Computes the mean delta of all clients after one step and after all."""
    gradient_of = jax.jit(jax.grad(mean_loss(network(problem.model))))
    start = {name: value.astype(np.float64) for name, value in problem.params.items()}
    x, y = problem.in_order()
    checkpoints = sorted({1, problem.num_steps})
    totals = {steps: {k: np.zeros_like(v) for k, v in start.items()} for steps in checkpoints}
    for client in range(problem.num_clients):
        params = start
        for step in range(problem.num_steps):
            batch = x[client, step].astype(np.float64), y[client, step]
            gradient = _gradient(problem, gradient_of, params, *batch)
            params = {k: v - problem.learning_rate * gradient[k] for k, v in params.items()}
            if step + 1 in checkpoints:
                delta = {k: params[k] - start[k] for k in start}
                if problem.unit == "client":
                    delta = clip(delta, problem.clip_norm)
                totals[step + 1] = {k: v + delta[k] for k, v in totals[step + 1].items()}
    return {
        steps: {k: v / problem.num_clients for k, v in total.items()}
        for steps, total in totals.items()
    }


def clip(tree: Params, clip_norm: float) -> Params:
    """Scales arrays down together to an L2 norm of at most `clip_norm`."""
    norm = np.sqrt(sum(float(np.sum(v**2)) for v in tree.values()))
    factor = min(1.0, clip_norm / norm) if norm > 0 else 1.0
    return {k: v * factor for k, v in tree.items()}


def _gradient(problem: Problem, gradient_of, params: Params, x, y) -> Params:
    if problem.unit != "record":
        return {k: np.asarray(v) for k, v in gradient_of(params, x, y).items()}
    total = {k: np.zeros_like(v) for k, v in params.items()}
    for i in range(len(x)):
        one = gradient_of(params, x[i : i + 1], y[i : i + 1])
        one = clip({k: np.asarray(v) for k, v in one.items()}, problem.clip_norm)
        total = {k: v + one[k] for k, v in total.items()}
    return {k: v / len(x) for k, v in total.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problem")
    parser.add_argument("--clients", type=int)
    parser.add_argument("--steps", type=int, help="all where left out")
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    problem = load(options.problem, options.clients)
    found = deltas(problem._replace(batches=problem.batches[:, : options.steps]))
    flat = {f"{steps}/{k}": v for steps, delta in found.items() for k, v in delta.items()}
    save_delta(options.output, flat)


if __name__ == "__main__":
    main()
