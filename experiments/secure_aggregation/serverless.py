"""Rounds without a server on digits, and the simulated times of table 5.3."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.secure_aggregation import privacyfl
from fedjax_dp import FederatedData, algorithms, engine, models
from fedjax_dp.clients import LocalConfig, local_trainer
from fedjax_dp.data import full_participation, participation
from fedjax_dp.engine.federation import Federation
from fedjax_dp.server import secure
from fedjax_dp.server.mean import counted_mean

CITIES = ("Boston", "Singapore", "NYC")
# One-way seconds between cities, which the thesis does not print.
SECONDS = ((0, 5, 0.2), (5, 0, 6), (0.2, 6, 0))
ROWS, ITERATIONS = 30, 7
# Of the source: the regulariser of training. It names no number of steps.
_REGULARIZER, _STEPS = 1e-4, 300


def between() -> engine.Latencies:
    """Builds the latencies between three cities."""
    return engine.latencies(CITIES, SECONDS, CITIES)


def simulation_of() -> engine.Simulation:
    """Compiles rounds without a server: clients train from scratch on 30 more rows each time."""
    x, y, *_ = privacyfl.digits()
    count, owned = len(CITIES), ITERATIONS * ROWS
    clients = np.repeat(np.arange(count), owned)
    data = FederatedData.from_client_ids({"x": x[: len(clients)], "y": y[: len(clients)]}, clients)
    shape = jax.ShapeDtypeStruct(x.shape[1:], jnp.float32)
    model = models.logistic_regression(shape, 10, gradient_bound=1.0)
    bounds = models.loss_bounds(model)
    assert bounds is not None
    rate = 2 / (bounds.curvature + 2 * _REGULARIZER)
    numbers = LocalConfig(learning_rate=rate, batch_size=1, num_steps=_STEPS)
    whole = full_participation()._replace(name="full_batch")
    graph = secure.all_pairs(count, colluders=1)
    masks = secure.masked(counted_mean(), secure.fixed_point(count, integer_bits=6), graph)
    algorithm = algorithms.retrained_averaging(
        model,
        local_trainer(model, numbers, sampler=whole),
        num_clients=count,
        rows_per_round=ROWS,
        perturbation=algorithms.OutputPerturbation(_REGULARIZER),
        personal="own",
        aggregator=masks,
    )
    free = engine.compute_seconds(count)

    def alone(federation: Federation) -> Federation:
        peers = engine.serverless(federation)
        return engine.clocked(peers, latencies=between(), compute=free, server_seconds=0.0)

    everyone = participation(full_participation(), count)
    return engine.simulation(algorithm, data, everyone, wrapper=alone)


def run(iterations: int, seed: int) -> list[dict[str, Any]]:
    """Scores the federated model and each client's own in every iteration."""
    _, _, *test = privacyfl.digits()
    sim, key = simulation_of(), jax.random.key(seed)
    state, rows = sim.init(key), []
    for r in range(1, iterations + 1):
        state, _, info = sim.run(state, key, 1)
        shared, own = jax.device_get((state.server.params, state.clients.trained))
        rows.append(
            {
                "iteration": r,
                "rows": r * ROWS,
                "federated": float(privacyfl.accuracy(shared, *test)),
                "personal": privacyfl.accuracy(own, *test).tolist(),
                "seconds": float(info.server["round_seconds"][0]),
                "messages": int(info.server["num_messages"][0]),
            }
        )
    return rows


def times() -> list[dict[str, Any]]:
    """Adds the times without a server to those of table 5.3."""
    rows, free = privacyfl.times(), engine.compute_seconds(len(CITIES))
    for iteration in (1, 2, 3):
        part = [row for row in rows if row["iteration"] == iteration]
        is_there = [row["paper"] != "dropped" for row in part]
        alone = engine.serverless_times(between(), free, active=is_there)
        for row, seconds in zip(part, alone, strict=True):
            row["serverless"] = float(seconds)
    return rows


def as_markdown(result: dict[str, Any]) -> str:
    """Writes both tables."""
    head = f"| iteration | rows a client | federated | {' | '.join(CITIES)} |"
    lines = [head, "|---" * 6 + "|"]
    for row in result["accuracy"]:
        scores = " | ".join(f"{score:.3f}" for score in (row["federated"], *row["personal"]))
        lines.append(f"| {row['iteration']} | {row['rows']} | {scores} |")
    lines += [
        "",
        "| iteration | city | thesis, s | ours, s | without a server, s |",
        "|---" * 5 + "|",
    ]
    for row in result["times"]:
        ours, alone = (_seconds(row[n]) for n in ("ours", "serverless"))
        lines.append(f"| {row['iteration']} | {row['city']} | {row['paper']} | {ours} | {alone} |")
    return "\n".join(lines) + "\n"


def _seconds(value: float | None) -> str:
    """Formats seconds; nothing for a city that has left."""
    return "" if value is None or np.isnan(value) else f"{value:.3f}"
