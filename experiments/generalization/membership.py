"""Membership attacks on runs of a study: `python -m experiments.generalization.membership FOLDER`.

The argument is a folder of runs, as `masking.py` leaves them; each run's last model is attacked
through its outputs, with its training examples as members and the test part as others.
"""

import argparse
import pathlib
from collections.abc import Sequence

import numpy as np

from fedjax_dp.audit import attack_model
from fedjax_dp.core import checks
from fedjax_dp.experiment import load_run

COLUMNS = ("aggregation", "seed", "accuracy", "auc")
# An attacker distinguishes their test parts from any training part, members or not.
SHIFTED = ("fedcmnist", "fedrotmnist")


def attacked(folder: pathlib.Path, seed: int = 0) -> dict[str, float]:
    """Attacks the model of a run.

    Returns:
      The attacker's accuracy and area under the curve, and the model's accuracy on either side.
    """
    run = load_run(folder)
    name, rule = run.config.data.name, "have a test part like its training part to be attacked"
    checks.require(name not in SHIFTED, "data.name", rule, name)
    population = run.experiment.population
    assert population.test is not None
    members, others = population.train.examples, population.test.examples
    rng = np.random.default_rng(seed)
    result = attack_model(run.model, run.params, members, others, rng)
    return {"accuracy": result.accuracy, "auc": result.auc}


def main(arguments: Sequence[str] | None = None) -> None:
    """Attacks the models of an algorithm under both aggregations, and writes a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", type=pathlib.Path, help="a folder of runs")
    parser.add_argument("--algorithm", default="FedAvg", help="whose runs, FedAvg")
    parser.add_argument("--output", type=pathlib.Path, help="a CSV file, if not one of the study")
    known = parser.parse_args(arguments)
    lines = [",".join(COLUMNS)]
    for folder in sorted(known.study.glob(f"algorithm={known.algorithm},*seed=*")):
        if (folder / "summary.json").is_file():
            named = dict(part.split("=", 1) for part in folder.name.split(","))
            figures = attacked(folder)
            cells = [named["aggregation"], named["seed"]]
            cells += [f"{100 * figures[name]:.4f}" for name in COLUMNS[2:]]
            lines.append(",".join(cells))
            print(lines[-1], flush=True)
    file = known.output or known.study / "membership.csv"
    file.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
