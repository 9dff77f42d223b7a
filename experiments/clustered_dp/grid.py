"""The grid of the study: what a method changes, how a result is named, and what makes two alike."""

import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_dp.data.clusters import CLUSTER_SIZES
from fedjax_dp.experiment import Config, load_config

SELECTION_SHARE = 0.03  # of the total ε, for one private choice

# Our names, and how the paper calls the same thing in its tables.
METHODS = {
    "R-DPCFL": None,
    "R-DPCFL, M unknown": None,
    "R-DPCFL, M unknown, plain": None,
    "RC-DPFL": "RC-DPFL",
    "f-CDPFL": "f-CDPFL",
    "IFCA": None,
    "KM-CDPFL": "KM-CDPFL",
    "MR-MTL": None,
    "Local": None,
    "Global": "DPFedAvg",
    "Oracle": "O-CDPFL",
}
# The budgets of the paper's tables 3 to 10.
PAPER_EPSILONS = (10.0, 5.0, 4.0, 3.0, 2.0)

# Where a method trains with other numbers than R-DPCFL, by the name of the setting: the paper's,
# but in the small setting.
LARGE_BATCHES = ("--training.batch_size=64",)
OTHER_NUMBERS: dict[str, dict[str, tuple[str, ...]]] = {
    "clustered_mnist": {"Local": ("--training.learning_rate=0.01",)},
    # Its pull in a step is λ times the learning rate: as at full size, where λ is 1.
    "clustered_mnist_two_cores": {"MR-MTL": ("--algorithm.options.strength=0.01",)},
    "clustered_cifar10_labels": dict.fromkeys(
        ("IFCA", "f-CDPFL", "Global", "MR-MTL", "Local"), LARGE_BATCHES
    ),
    "clustered_cifar10_rotation": dict.fromkeys(("IFCA", "f-CDPFL"), LARGE_BATCHES)
    | dict.fromkeys(
        ("Global", "MR-MTL", "Local"),
        (*LARGE_BATCHES, "--training.learning_rate=0.0005", "--privacy.record.clip_norm=4.0"),
    ),
}


class Point(NamedTuple):
    """One run of the grid.

    Attributes:
      method: its name here.
      setting: the configuration that all methods share, with this run's ε and seed.
      words: what the method changes in it.
      config: the configuration that runs.
    """

    method: str
    setting: Config
    words: tuple[str, ...]
    config: Config

    @property
    def name(self) -> str:
        """The stem of the result's file."""
        epsilon = self.setting.privacy.record.epsilon
        return f"method={self.method},epsilon={epsilon:g},seed={self.setting.run.seed}"

    @property
    def reference_name(self) -> str:
        """The stem of the file of the models to compare with, which know no ε."""
        return f"reference,seed={self.setting.run.seed}"


def points(
    file: str | pathlib.Path,
    methods: Sequence[str],
    epsilons: Sequence[float],
    seeds: Sequence[int],
    words: Sequence[str] = (),
) -> list[Point]:
    """Lists the runs of a grid of seeds × budgets × methods.

    Args:
      file: the configuration of the study.
      methods: names of `METHODS`.
      epsilons: budgets; that of the configuration where there is none.
      seeds: seeds.
      words: overrides that hold for every run.
    """
    found = []
    for seed in seeds:
        for epsilon in epsilons or [None]:
            budget = [] if epsilon is None else [f"--privacy.record.epsilon={epsilon}"]
            shared = (f"--run.seed={seed}", *words, *budget)
            setting = load_config(file, shared)
            for method in methods:
                own = words_of(method, setting)
                config = load_config(file, (*shared, *own))
                found.append(Point(method, setting, own, config))
    return found


def true_clusters(config: Config) -> np.ndarray:
    """The cluster of each client, as the partition deals them out."""
    sizes = config.data.partition_options.get("cluster_sizes", CLUSTER_SIZES)
    return np.repeat(np.arange(len(sizes)), sizes)


def words_of(method: str, setting: Config) -> tuple[str, ...]:
    """What a method changes in the configuration of the study."""
    clusters = true_clusters(setting)
    options = {"num_models": int(clusters.max()) + 1}
    choice = {"selection_epsilon": SELECTION_SHARE * float(setting.privacy.record.epsilon)}
    name, options = {
        "R-DPCFL": ("r_dpcfl", options | choice),
        "R-DPCFL, M unknown": ("r_dpcfl", choice),
        "R-DPCFL, M unknown, plain": ("r_dpcfl", choice | {"separation": "plain"}),
        "RC-DPFL": ("rc_dpfl", options),
        "f-CDPFL": ("f_cdpfl", options | {"selection": "exact"}),
        "IFCA": ("f_cdpfl", options | choice),
        "KM-CDPFL": ("km_cdpfl", options),
        "MR-MTL": ("mr_mtl", {}),
        "Local": ("local_only", {}),
        "Global": ("dp_sgd", {}),
        "Oracle": ("o_dpcfl", {"clusters": clusters.tolist()}),
    }[method]
    given = [f"--algorithm.options.{key}={json.dumps(value)}" for key, value in options.items()]
    numbers = OTHER_NUMBERS.get(setting.run.name, {}).get(method, ())
    return (f"--algorithm.name={name}", *given, *numbers)
