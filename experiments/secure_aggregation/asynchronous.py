"""Synchronous and asynchronous rounds by simulated time, on MNIST by writer with stragglers."""

from functools import partial
from typing import Any

import jax
import numpy as np

from fedjax_dp import algorithms, clients, data, engine, models
from fedjax_dp.data import datasets
from fedjax_dp.io import drawing

# Seconds of a local step by class of device, and the share of the clients that have one.
CLASSES = {"workstation": (0.02, 0.5), "laptop": (0.1, 0.3), "phone": (0.6, 0.2)}
# One-way seconds of a message to a server in the same city, and its mean jitter.
LATENCY, JITTER, SERVER_SECONDS = 0.05, 0.02, 0.1
AT_WORK, BUFFER, MAX_STALENESS = 40, 10, 40
# Updates between two evaluations.
EVERY = 80
TARGETS = (0.8, 0.85, 0.88)


def clock_of(num_clients: int, seed: int) -> dict[str, Any]:
    """Puts clients at random into classes of devices."""
    shares = [share for _, share in CLASSES.values()]
    classes = np.random.default_rng(seed).choice(list(CLASSES), num_clients, p=shares)
    seconds = {name: step for name, (step, _) in CLASSES.items()}
    here = ["city"] * num_clients
    return {
        "latencies": engine.latencies(["city"], [[LATENCY]], here, "city", jitter=JITTER),
        "compute": engine.compute_seconds(num_clients, per_step=seconds, classes=list(classes)),
        "server_seconds": SERVER_SECONDS,
    }


def simulation_of(name: str, train: Any, model: Any, seed: int) -> engine.Simulation:
    """Builds FedAvg with one local epoch, with or without waiting for all clients at work."""
    clock, num_clients = clock_of(train.num_clients, seed), train.num_clients
    trainer = clients.local_trainer(
        model, clients.LocalConfig(learning_rate=0.1, batch_size=20, num_epochs=1)
    )
    size = AT_WORK if name == "synchronous" else BUFFER
    joined = data.participation(data.fixed_size(), num_clients, size)
    wrapper = partial(engine.clocked, **clock)
    if name == "asynchronous":
        wrapper = partial(
            engine.asynchronous, **clock, concurrency=AT_WORK, max_staleness=MAX_STALENESS
        )
    return engine.simulation(algorithms.fedavg(model, trainer), train, joined, wrapper=wrapper)


def run(seed: int, num_updates: int) -> dict[str, Any]:
    """Trains a logistic regression on so many updates, and evaluates it after every 80."""
    mnist = datasets.load("mnist_by_writer")
    train = data.FederatedData.from_client_ids(mnist.train, mnist.train_clients)
    test = data.FederatedData.from_clients([mnist.test])
    model = models.build("logistic_regression", data.example_structure(train), mnist.num_classes)
    curves = {}
    for name in ("synchronous", "asynchronous"):
        sim = simulation_of(name, train, model, seed)
        whole = engine.evaluator(sim, model, train, whole=test).whole
        key = jax.random.key(seed)
        state = sim.init(key)
        every = EVERY // int(sim.participation.cohort_size)
        curve: dict[str, list[float]] = {"seconds": [0.0], "accuracy": [], "staleness": []}
        curve["accuracy"].append(float(whole(state).accuracy))
        for _ in range(num_updates // EVERY):
            state, _, info = sim.run(state, key, every)
            curve["seconds"].append(float(info.server["simulated_seconds"][-1]))
            curve["accuracy"].append(float(whole(state).accuracy))
            staleness = info.server.get("staleness_mean", np.zeros(1))
            curve["staleness"].append(float(np.mean(staleness)))
        curves[name] = curve
    return {"num_clients": train.num_clients, "seed": seed, "curves": curves}


def seconds_to(curve: dict[str, list[float]], accuracy: float) -> float | None:
    """Finds when a curve reaches an accuracy and stays above it at the next evaluation."""
    reached = np.array(curve["accuracy"]) >= accuracy
    stays = reached & np.append(reached[1:], True)
    return curve["seconds"][int(np.argmax(stays))] if stays.any() else None


def as_markdown(result: dict[str, Any]) -> str:
    """Writes when each way reaches accuracies."""
    names, curves = list(result["curves"]), result["curves"]
    lines = [
        f"{result['num_clients']} writers, {AT_WORK} at work at any time, buffer of {BUFFER}",
        "",
        f"| test accuracy | {' s | '.join(names)} s | ratio |",
        "|---|---|---|---|",
    ]
    for target in TARGETS:
        found = [seconds_to(curves[name], target) for name in names]
        shown = ["not reached" if x is None else f"{x:,.0f}" for x in found]
        both = [x for x in found if x is not None]
        ratio = f"{both[0] / both[1]:.1f}" if len(both) == len(names) else ""
        lines.append(f"| {target} | {' | '.join(shown)} | {ratio} |")
    ends = [f"{curves[name]['accuracy'][-1]:.4f}" for name in names]
    seconds = [f"{curves[name]['seconds'][-1]:,.0f}" for name in names]
    lines += [
        "",
        f"At the end: accuracy {' and '.join(ends)} after {' and '.join(seconds)} s. "
        f"Mean staleness {np.mean(curves['asynchronous']['staleness']):.1f}.",
    ]
    return "\n".join(lines) + "\n"


def draw(result: dict[str, Any]) -> Any:
    """Draws accuracy by simulated time."""
    figure = drawing.new_figure()
    axes = figure.subplots()
    for index, (name, curve) in enumerate(result["curves"].items()):
        drawing.draw_curve(axes, index, curve["seconds"], curve["accuracy"], name)
    axes.set(xlabel="simulated seconds", ylabel="test accuracy", ylim=(0, 1))
    axes.grid(alpha=0.25)
    drawing.legend_above(axes)
    return figure
