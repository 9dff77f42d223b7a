"""One workload as arrays: what every implementation trains on. Needs NumPy alone."""

import json
import pathlib
from typing import NamedTuple

import numpy as np

Params = dict[str, np.ndarray]


class Problem(NamedTuple):
    """Data, weights, batches and numbers of one workload.

    Attributes:
      name: the workload.
      model: "logistic_regression", "emnist_cnn", "thesis_cnn" or "resnet18".
      unit: "none", "client" (a client's delta is clipped) or "record" (every example's gradient
        is).
      num_classes: of the labels.
      learning_rate: of local SGD.
      clip_norm: the L2 bound, or None.
      noise_multiplier: noise standard deviation over `clip_norm`.
      x: examples by client, `[clients, examples, ...]`, float32.
      y: labels, `[clients, examples]`, int32.
      batches: which examples a client reads in a step, `[clients, steps, batch]`, int32.
      params: initial weights by path, such as "Conv_0/kernel"; kernels are
        `[height, width, in, out]` or `[in, out]`.
    """

    name: str
    model: str
    unit: str
    num_classes: int
    learning_rate: float
    clip_norm: float | None
    noise_multiplier: float
    x: np.ndarray
    y: np.ndarray
    batches: np.ndarray
    params: Params

    @property
    def num_clients(self) -> int:
        return self.batches.shape[0]

    @property
    def num_steps(self) -> int:
        return self.batches.shape[1]

    @property
    def batch_size(self) -> int:
        return self.batches.shape[2]

    def in_order(self) -> tuple[np.ndarray, np.ndarray]:
        """Lays the examples out in the order in which they are read.

        Returns:
          Inputs `[clients, steps, batch, ...]` and labels `[clients, steps, batch]`.
        """
        shape = self.batches.shape
        num_examples = self.x.shape[1]
        rows = self.batches.reshape(shape[0], -1)
        if rows.shape[1] == num_examples and np.all(rows == np.arange(num_examples)):
            return self.x.reshape(*shape, *self.x.shape[2:]), self.y.reshape(shape)
        clients = np.arange(shape[0])[:, None]
        x = self.x[clients, rows].reshape(*shape, *self.x.shape[2:])
        return x, self.y[clients, rows].reshape(shape)

    def double(self) -> "Problem":
        """Turns inputs and weights into float64, for telling rounding from error."""
        params = {name: value.astype(np.float64) for name, value in self.params.items()}
        return self._replace(x=self.x.astype(np.float64), params=params)

    def save(self, path: pathlib.Path) -> None:
        numbers = {
            "name": self.name,
            "model": self.model,
            "unit": self.unit,
            "num_classes": self.num_classes,
            "learning_rate": self.learning_rate,
            "clip_norm": self.clip_norm,
            "noise_multiplier": self.noise_multiplier,
        }
        np.savez(
            path,
            numbers=np.array(json.dumps(numbers)),
            x=self.x,
            y=self.y,
            batches=self.batches,
            **{f"params/{name}": value for name, value in self.params.items()},
        )


def load(path: pathlib.Path | str, num_clients: int | None = None) -> Problem:
    """Reads a problem, or its first clients."""
    with np.load(path) as file:
        numbers = json.loads(str(file["numbers"]))
        arrays = {name: file[name][:num_clients] for name in ("x", "y", "batches")}
        params = {k.removeprefix("params/"): file[k] for k in file.files if k.startswith("params/")}
    return Problem(**numbers, **arrays, params=params)


def save_delta(path: pathlib.Path | str, delta: Params) -> None:
    np.savez(path, **delta)


def load_delta(path: pathlib.Path | str) -> Params:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def difference(delta: Params, reference: Params) -> float:
    """Measures how far two deltas are apart, relative to the norm of the second.

    Returns:
      The L2 norm of the difference over that of the reference, in float64; infinity where names or
      shapes differ or a number is not finite.
    """
    if {k: v.shape for k, v in delta.items()} != {k: v.shape for k, v in reference.items()}:
        return float("inf")
    apart = sum(float(np.sum((delta[k].astype(np.float64) - reference[k]) ** 2)) for k in reference)
    size = sum(float(np.sum(reference[k].astype(np.float64) ** 2)) for k in reference)
    relative = (apart / size) ** 0.5 if size > 0 else float("inf")
    return relative if np.isfinite(relative) else float("inf")
