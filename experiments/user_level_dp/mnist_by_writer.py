"""BLUR + LUS, DP-FedAvg, DDGauss and AE-DPFL on MNIST by writer, tuned on a validation split.

    python -m experiments.user_level_dp.mnist_by_writer tune --output DIR --data.data_dir=DATA
    python -m experiments.user_level_dp.mnist_by_writer compare --output DIR --data.data_dir=DATA

`tune` reads the tenth of every writer's training digits that is held out; `compare` runs what that
chose, and reads the test set.
"""

import pathlib
import sys
from collections.abc import Mapping

from experiments.sweep import Study, main

FILE = pathlib.Path(__file__).with_name("mnist_by_writer.toml")


def clip(norm: float) -> tuple[str, ...]:
    return (f"--privacy.client.clip_norm={norm}",)


def regularised(strength: float, sparsity: float) -> tuple[str, ...]:
    return (
        "--algorithm.name=blur_lus",
        f"--algorithm.options.strength={strength}",
        f"--algorithm.options.sparsity={sparsity}",
    )


_LOCAL = {
    "DP-FedAvg": ("--algorithm.name=dp_fedavg",),
    "LUS c=.7": regularised(0, 0.7),
    "BLUR λ=.4": regularised(0.4, 0),
    "BLUR λ=5": regularised(5, 0),
    "BLUR λ=.4 + LUS c=.3": regularised(0.4, 0.3),
    "BLUR λ=.4 + LUS c=.7": regularised(0.4, 0.7),
    "BLUR λ=5 + LUS c=.3": regularised(5, 0.3),
    "BLUR λ=5 + LUS c=.7": regularised(5, 0.7),
}

TUNE = Study(
    name="user_level_dp_tuning",
    file=FILE,
    axes={
        "method": _LOCAL,
        "S": {f"{s:g}": clip(s) for s in (0.1, 0.3, 1.0)},
        "seed": {"0": ("--run.seed=0",)},
    },
    rows="method",
    columns="S",
    metrics={"client_test_accuracy": 100.0},
)

# What `tune` chose.
_CLIP_NORM = 0.3
_BEST = regularised(0.4, 0.3)

_DDGAUSS = ("--algorithm.name=dp_fedavg", "--privacy.client.mechanism=discrete_gaussian")
_VOTES = (
    "--algorithm.name=ae_dpfl",
    "--algorithm.options.server_epochs=30",
    "--data.public_examples=1000",
    "--run.rounds=1",
    "--run.evaluate_every=1",
    "--run.checkpoint_every=1",
    "--participation.sampler=full_participation",
    "--participation.cohort_size=none",
    "--training.num_steps=60",
)
# The same training without clipping and noise: what privacy costs at most.
_OPEN = (
    "--algorithm.name=fedavg",
    "--privacy.unit=none",
)

METHODS = {
    "FedAvg not private": _OPEN,
    "DP-FedAvg": (*_LOCAL["DP-FedAvg"], *clip(_CLIP_NORM)),
    "DP-FedAvg + BLUR + LUS": (*_BEST, *clip(_CLIP_NORM)),
    "DDGauss 16 bits": (*_DDGAUSS, "--privacy.client.bits=16", *clip(_CLIP_NORM)),
    "AE-DPFL": _VOTES,
}


def _is_skipped(values: Mapping[str, str]) -> bool:
    """Other budgets than 4 are run once, votes once, and what is not private at one of them."""
    method, is_main = values["method"], values["budget"] == "4"
    if values["seed"] != "0":
        return not is_main or method == "AE-DPFL"
    return not is_main and method in ("FedAvg not private", "AE-DPFL")


COMPARE = Study(
    name="user_level_dp",
    file=FILE,
    axes={
        "method": METHODS,
        "budget": {str(e): (f"--privacy.client.epsilon={e}.0",) for e in (2, 4, 8)},
        "seed": {str(seed): (f"--run.seed={seed}",) for seed in range(3)},
    },
    rows="method",
    columns="budget",
    metrics={"test_accuracy": 100.0, "client_test_accuracy": 100.0},
    skip=_is_skipped,
)

if __name__ == "__main__":
    main({"tune": TUNE, "compare": COMPARE}[sys.argv[1]], sys.argv[2:])
