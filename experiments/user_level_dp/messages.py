"""What BLUR and LUS change of the messages of real clients, in NumPy and float64.

    python -m experiments.user_level_dp.messages --output FOLDER [--data_dir DATA]

The package's code is not used, but for its reader of MNIST by writer. At the start of training and
after rounds of DP-FedAvg, the same clients train from the same model on the same mini-batches with
and without BLUR, at the paper's learning rate and steps. Compared are, of each update with and
without LUS, the length before clipping, the angle to the plain update, and the part of the message
that points down the loss of all clients: the noise on the mean is the same, so that this part is
what a round can gain. A model and clip norm that `messages.csv` has are not computed again.
"""

import argparse
import csv
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.user_level_dp.limits import (
    SAMPLING,
    SETTINGS,
    Array,
    as_csv,
    clipped,
    local_run,
    sparsified,
)

RATE, _, STEPS = SETTINGS[0].rate, SETTINGS[0].clip_norm, SETTINGS[0].steps
BATCH = 64
CLIP_NORMS = (0.03, 0.3)
# Strength of BLUR and sparsity of LUS: the defaults, the largest of the grids, and each alone.
METHODS = {
    "BLUR λ=0.4": (0.4, 0.0),
    "BLUR λ=0.8": (0.8, 0.0),
    "LUS c=0.3": (0.0, 0.3),
    "LUS c=0.7": (0.0, 0.7),
    "LUS c=0.9": (0.0, 0.9),
    "BLUR λ=0.4 + LUS c=0.7": (0.4, 0.7),
}
# The multiplier of table 1 at ε = 6.
NOISE_MULTIPLIER = 1.136
STAGES = {"logistic": (0, 100), "perceptron": (0, 10)}
WIDTHS = {"logistic": (784, 10), "perceptron": (784, 200, 200, 10)}
MEASURED = 60


class Clients(NamedTuple):
    """Inputs `[examples, features]` and labels of each client."""

    inputs: list[Array]
    labels: list[Array]


class Network(NamedTuple):
    """Fully connected layers with ReLU between them; weights are one vector."""

    widths: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        """The sizes of the tensors: a matrix and a bias for each layer."""
        pairs = zip(self.widths[:-1], self.widths[1:], strict=True)
        return [size for a, b in pairs for size in (a * b, b)]

    def start(self, rng: np.random.Generator) -> Array:
        """Draws matrices of variance 1 / inputs, and zeros for biases."""
        parts: list[Array] = []
        for a, b in zip(self.widths[:-1], self.widths[1:], strict=True):
            parts += [rng.normal(0, 1 / math.sqrt(a), a * b), np.zeros(b)]
        return np.concatenate(parts)

    def layers(self, weights: Array) -> list[tuple[Array, Array]]:
        parts = iter(np.split(weights, np.cumsum(self.sizes)[:-1]))
        pairs = zip(self.widths[:-1], self.widths[1:], strict=True)
        return [(next(parts).reshape(a, b), next(parts)) for a, b in pairs]

    def outputs(self, weights: Array, inputs: Array) -> list[Array]:
        """Computes the inputs of every layer, and the scores of classes."""
        found, layers = [inputs], self.layers(weights)
        for i, (matrix, bias) in enumerate(layers):
            linear = found[-1] @ matrix + bias
            found.append(linear if i == len(layers) - 1 else np.maximum(linear, 0))
        return found

    def gradient(self, weights: Array, inputs: Array, labels: Array) -> Array:
        """Computes the gradient of the mean cross-entropy."""
        *ins, scores = self.outputs(weights, inputs)
        slope = np.exp(scores - scores.max(axis=1, keepdims=True))
        slope /= slope.sum(axis=1, keepdims=True)
        slope[np.arange(len(labels)), labels] -= 1
        slope /= len(labels)
        parts: list[Array] = []
        for below, (matrix, _) in reversed(list(zip(ins, self.layers(weights), strict=True))):
            parts = [(below.T @ slope).ravel(), slope.sum(axis=0), *parts]
            slope = (slope @ matrix.T) * (below > 0)
        return np.concatenate(parts)


def batch_gradient(
    network: Network, clients: Clients, client: int, seed: Sequence[int]
) -> Callable[[Array, int], Array]:
    """Gives the gradient of a client's mini-batch by step: the same batches for the same seed."""
    inputs, labels = clients.inputs[client], clients.labels[client]
    rng = np.random.default_rng([*seed, client])
    picked = [rng.permutation(len(labels))[:BATCH] for _ in range(STEPS)]
    return lambda weights, step: network.gradient(
        weights, inputs[picked[step]], labels[picked[step]]
    )


def train(
    network: Network, clients: Clients, clip_norm: float, stages: Sequence[int], seed: int
) -> Iterator[tuple[int, Array]]:
    """Runs DP-FedAvg and yields the model after each of the rounds in `stages`."""
    rng = np.random.default_rng(seed)
    weights = network.start(rng)
    expected = SAMPLING * len(clients.labels)
    for number in range(max(stages) + 1):
        if number in stages:
            yield number, weights
        total = np.zeros_like(weights)
        for client in np.flatnonzero(rng.random(len(clients.labels)) < SAMPLING):
            gradient = batch_gradient(network, clients, int(client), (seed, number))
            total += clipped(local_run(gradient, weights, RATE, STEPS).update, clip_norm)
        noise = rng.normal(0, NOISE_MULTIPLIER * clip_norm, len(weights))
        weights = weights + (total + noise) / expected


def ratio(numbers: Array, plain: Array) -> tuple[float, float]:
    """Gives the ratio of two means over clients and its standard error, pairs being kept."""
    value = numbers.mean() / plain.mean()
    spread = np.std(numbers - value * plain, ddof=1)
    return float(value), float(spread / math.sqrt(len(plain)) / abs(plain.mean()))


class Message(NamedTuple):
    """A client's update as it arrives at clipping, beside the plain one.

    Attributes:
      length: its norm.
      shortened: its norm over that of the plain update.
      turned: the angle between the two, in degrees.
      useful: the part of the clipped update down the loss of all clients.
    """

    length: float
    shortened: float
    turned: float
    useful: float


def messages(
    network: Network,
    clients: Clients,
    weights: Array,
    clip_norm: float,
    chosen: Sequence[int],
    seed: int,
) -> tuple[dict[str, list[Message]], list[float]]:
    """Measures the messages of each method, "plain" among them, and opposed gradients.

    The second is, for each client, the share of pairs of gradients of its plain run that point
    against each other.
    """
    every = [network.gradient(weights, x, y) for x, y in zip(*clients, strict=True)]
    sizes = np.array([len(y) for y in clients.labels])
    downhill = -np.average(every, axis=0, weights=sizes)
    downhill /= np.linalg.norm(downhill)
    found: dict[str, list[Message]] = {name: [] for name in ("plain", *METHODS)}
    opposed = []
    for client in chosen:
        gradient = batch_gradient(network, clients, client, (seed,))
        strengths = {0.0} | {strength for strength, _ in METHODS.values()}
        runs = {s: local_run(gradient, weights, RATE, STEPS, s, clip_norm) for s in strengths}
        costs = {
            s: network.gradient(
                weights + run.update, clients.inputs[client], clients.labels[client]
            )
            for s, run in runs.items()
        }
        plain = runs[0.0].update
        products = runs[0.0].gradients @ runs[0.0].gradients.T
        opposed.append(float(np.mean(products[np.triu_indices(STEPS, 1)] < 0)))
        for name, (strength, sparsity) in {"plain": (0.0, 0.0), **METHODS}.items():
            update = runs[strength].update
            if sparsity:
                update = sparsified(update, costs[strength], sparsity, network.sizes)
            lengths = float(np.linalg.norm(update)), float(np.linalg.norm(plain))
            cosine = float(update @ plain) / math.prod(lengths)
            found[name].append(
                Message(
                    lengths[0],
                    lengths[0] / lengths[1],
                    math.degrees(math.acos(min(1.0, cosine))),
                    float(clipped(update, clip_norm) @ downhill),
                )
            )
    return found, opposed


def measure(
    name: str, clients: Clients, clip_norm: float, stages: Sequence[int], seed: int = 0
) -> list[dict[str, Any]]:
    """Measures a network at its stages and gives a row for each method."""
    network, rows = Network(WIDTHS[name]), []
    number = min(MEASURED, len(clients.labels))
    chosen = np.random.default_rng(seed).permutation(len(clients.labels))[:number].tolist()
    for stage, weights in train(network, clients, clip_norm, stages, seed):
        found, opposed = messages(network, clients, weights, clip_norm, chosen, seed)
        useful = {key: np.array([m.useful for m in each]) for key, each in found.items()}
        for method, each in found.items():
            lengths = np.array([m.length for m in each])
            factor, error = ratio(useful[method], useful["plain"])
            rows.append(
                {
                    "model": name,
                    "clip_norm": clip_norm,
                    "round": stage,
                    "method": method,
                    "length": float(np.median(lengths)) / clip_norm,
                    "share_longer": float(np.mean(lengths > clip_norm)),
                    "shortened": float(np.median([m.shortened for m in each])),
                    "shortened_most": float(np.min([m.shortened for m in each])),
                    "turned": float(np.median([m.turned for m in each])),
                    "turned_most": float(np.max([m.turned for m in each])),
                    "useful_share": float(useful[method].mean()) / clip_norm,
                    "factor": factor,
                    "factor_error": error,
                    "opposed_pairs": float(np.mean(opposed)),
                }
            )
    return rows


def writers(data_dir: pathlib.Path | None) -> Clients:
    """Reads the clients of MNIST by writer."""
    from fedjax_dp.data.datasets import load

    data = load("mnist_by_writer", data_dir)
    assert data.train_clients is not None
    inputs = np.asarray(data.train["x"], np.float64).reshape(len(data.train["y"]), -1)
    names = np.unique(data.train_clients)
    each = [np.flatnonzero(data.train_clients == name) for name in names]
    return Clients([inputs[i] for i in each], [data.train["y"][i] for i in each])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--data_dir", type=pathlib.Path)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / "messages.csv"
    done: list[dict[str, Any]] = []
    if file.is_file():
        done = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    clients = writers(options.data_dir)
    for name, stages in STAGES.items():
        for clip_norm in CLIP_NORMS:
            place = name, f"{clip_norm:g}"
            if place not in {(row["model"], row["clip_norm"]) for row in done}:
                done += measure(name, clients, clip_norm, stages)
                file.write_text(as_csv(done), encoding="utf-8")
                print(*place, flush=True)


if __name__ == "__main__":
    main()
