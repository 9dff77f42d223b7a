"""Membership attacks on runs of a study: `python -m experiments.generalization.membership FOLDER`.

The argument is a folder of runs, as `masking.py` leaves them; each run's last model is attacked
through its outputs, with its training examples as members and the test part as others.
"""

import argparse
import pathlib
from collections.abc import Sequence

import numpy as np

from experiments.generalization import tables
from fedjax_dp.audit import attack_model
from fedjax_dp.core import checks
from fedjax_dp.experiment import load_run

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
    """Prints a table of the aggregations of a study."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", type=pathlib.Path, help="a folder of runs")
    known = parser.parse_args(arguments)
    found: dict[str, list[dict[str, float]]] = {}
    for folder in sorted(known.study.glob("*seed=*")):
        if (folder / "summary.json").is_file():
            name = folder.name.rpartition(",seed=")[0]
            found.setdefault(name, []).append(attacked(folder))
            print(folder.name, found[name][-1], flush=True)
    lines = ["| runs | attack accuracy | area under the curve | seeds |", "|---" * 4 + "|"]
    for name, results in found.items():
        kinds = ("accuracy", "auc")
        cells = [tables.shown(100 * np.array([r[kind] for r in results])) for kind in kinds]
        lines.append(f"| {name} | {' | '.join(cells)} | {len(results)} |")
    text = "\n".join([*lines, ""])
    (known.study / "membership.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
