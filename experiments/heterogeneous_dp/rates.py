"""Each method at its own learning rate: `python -m experiments.heterogeneous_dp.rates STUDY …`.

The source tunes methods apart; its tables B.3 to B.6, of the rates, are not available. Here every
rate of `RATES` trains on the data of seed 0, and each method gets the rate of the highest mean
accuracy on the clients' held-out examples, cell by cell. What is compared are runs with these rates
on other seeds. `STUDY.csv` of the folder has the results: of seed 0 accuracies on held-out
examples, of the other seeds on the test part, of some in the last round alone. `chosen/STUDY.csv`
has the rates, as `--settings` of a sweep reads them. A command that was interrupted continues where
it stopped.
"""

import argparse
import csv
import itertools
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from experiments.heterogeneous_dp.side_by_side import Lane, Score, methods_of, population, train
from experiments.heterogeneous_dp.sweep import ALGORITHMS, BUDGETS, FOUR, HERE, REDUCED, falsified
from experiments.sweep import add_workers, each_of, workers

RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4)
TUNED_ON, SEEDS = 0, (1, 2, 3, 4, 5)
ROUNDS = 20
# Models that train side by side: so many that those of a step stay in a cache.
TOGETHER = 7
COLUMNS = ("distribution", "clients", "method", "rate", "seed", "round", "data", "accuracy")
Row = dict[str, Any]


class Study(NamedTuple):
    """Cells, pairs of budgets and a number of clients, in each of which methods are compared.

    A method's name may end in " x10", what a client declares of its budget: it gets the rate of
    the method where all declare their true ones, " x1".
    """

    file: str
    methods: Mapping[str, Sequence[str]]
    cells: Sequence[tuple[str, int]]


Piece = tuple[Study, list[Lane], tuple[str, int], int]
_TWENTY = tuple((name, 20) for name in ("Dist6", "Dist8", "Dist2"))
# Those that read no claim are the same at each.
_CLAIMS = {name: falsified()[name] for name in falsified() if name.endswith((" x1", " x10"))}
STUDIES = {
    "mnist": Study("mnist.toml", ALGORITHMS, _TWENTY),
    "fashion_mnist": Study("fashion_mnist.toml", FOUR, _TWENTY),
    "num_clients": Study("mnist.toml", FOUR, (("Dist6", 60), ("Dist6", 40))),
    "falsified": Study(
        "mnist.toml",
        {"Robust-HDP": ALGORITHMS["Robust-HDP"], **_CLAIMS},
        (("Dist5", 20),),
    ),
    "label_skew": Study("mnist_label_skew.toml", FOUR, tuple((name, 60) for name in BUDGETS)),
}


def tuned_as(method: str) -> str:
    """Names the method whose rate another has: the oracle that of what estimates its weights."""
    name, times, _ = method.partition(" x")
    return "Robust-HDP" if name == "oracle" else f"{name} x1" if times else name


def chosen(rows: Sequence[Row], cell: tuple[str, int]) -> dict[str, float]:
    """Chooses the rate of each method in a cell by held-out examples; the smallest of equals."""
    best: dict[str, tuple[float, float]] = {}
    for row in rows:
        is_here = (row["distribution"], int(row["clients"])) == cell
        if is_here and row["data"] == "held out" and int(row["seed"]) == TUNED_ON:
            score = float(row["accuracy"]), -float(row["rate"])
            best[row["method"]] = max(best.get(row["method"], score), score)
    return {method: -negative for method, (_, negative) in best.items()}


def write_chosen(file: pathlib.Path, study: Study, rows: Sequence[Row]) -> None:
    """Writes the chosen rates as settings of a sweep, whose axes are named as there."""
    has_counts = len({clients for _, clients in study.cells}) > 1
    axes = [*(["clients"] if has_counts else []), "distribution", "algorithm"]
    lines = []
    for distribution, clients in study.cells:
        rates = chosen(rows, (distribution, clients))
        values = {"distribution": distribution, "clients": clients}
        lines += [
            {**values, "algorithm": method, "training.learning_rate": rates[tuned_as(method)]}
            for method in study.methods
        ]
    write(file, lines, [*axes, "training.learning_rate"])


def lanes_of(study: Study, rows: Sequence[Row], cell: tuple[str, int], seed: int) -> list[Lane]:
    """Lists the models of a cell and seed."""
    if seed == TUNED_ON:
        return [Lane(m, rate) for m in study.methods if tuned_as(m) == m for rate in RATES]
    rates = chosen(rows, cell)
    return [Lane(method, rates[tuned_as(method)]) for method in study.methods]


def missing(study: Study, rows: Sequence[Row], cell: tuple[str, int], seed: int) -> list[Lane]:
    """Lists the models of a cell and seed that have no result yet."""
    done = {(row["method"], float(row["rate"])) for row in rows if _place(row) == (*cell, seed)}
    return [lane for lane in lanes_of(study, rows, cell, seed) if tuple(lane) not in done]


def pieces(study: Study, rows: Sequence[Row], seeds: Sequence[int]) -> Iterator[Piece]:
    """Lists what is missing, in pieces of models that train side by side."""
    for cell, seed in itertools.product(study.cells, seeds):
        lanes = missing(study, rows, cell, seed)
        for first in range(0, len(lanes), TOGETHER):
            yield study, lanes[first : first + TOGETHER], cell, seed


def results(study: Study, lanes: Sequence[Lane], cell: tuple[str, int], seed: int) -> list[Row]:
    """Trains some models of a cell and seed."""
    distribution, clients = cell
    file = HERE / study.file
    of_clients = [*REDUCED, f"--data.num_clients={clients}"]
    words = [*of_clients, f"--run.seed={seed}"]
    data = population(file, words)
    names = dict.fromkeys(lane.method for lane in lanes)
    own = {m: [*words, *BUDGETS[distribution], *study.methods[m]] for m in names}
    held_out = seed == TUNED_ON
    found: list[Row] = []

    def note(number: int, params: Any, score: Score) -> None:
        if number < ROUNDS and held_out:
            return
        part = data.client_test if held_out else data.test
        for lane, accuracy in zip(lanes, score(part).mean(axis=1), strict=False):
            values = lane.method, lane.rate, seed, number, "held out" if held_out else "test"
            found.append(dict(zip(COLUMNS, (*cell, *values, f"{100 * accuracy:.2f}"), strict=True)))

    # Programs of one number of models are compiled once.
    padded = [*lanes, *[lanes[-1]] * (-len(lanes) % TOGETHER)]
    train(file, of_clients, methods_of(file, own, data), padded, data, seed, ROUNDS, note)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is missing of some studies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="+", choices=STUDIES, metavar="STUDY")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results" / "rates")
    parser.add_argument("--only", nargs="+", metavar="METHOD", help="some methods, such as PFA")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of what is compared")
    parser.add_argument("--seconds", type=float, default=np.inf, help="start nothing later")
    add_workers(parser)
    known = parser.parse_args(arguments)
    if min(known.seeds) <= TUNED_ON:
        parser.error(f"--seeds must be above {TUNED_ON}, which chooses the rates: {known.seeds}")
    started = time.perf_counter()

    def is_in_time(_: Any) -> bool:
        return time.perf_counter() - started <= known.seconds

    for name in known.studies:
        study, file = STUDIES[name], known.output / f"{name}.csv"
        if known.only:
            if not set(known.only) <= set(study.methods):
                parser.error(f"--only must name methods of {list(study.methods)}")
            study = study._replace(methods={m: study.methods[m] for m in known.only})
        with workers(known, known.output) as cluster:
            # Other seeds run at the rates that the first one has chosen.
            for seeds in ([TUNED_ON], known.seeds):
                parts = takewhile(is_in_time, list(pieces(study, read(file), seeds)))
                for (_, lanes, cell, seed), found in each_of(results, parts, cluster):
                    write(file, [*read(file), *found], COLUMNS)
                    print(f"{name}, {cell}, seed {seed}: {len(lanes)} models", flush=True)
                if next(pieces(study, read(file), seeds), None):
                    return
        write_chosen(known.output / "chosen" / file.name, study, read(file))


def _place(row: Row) -> tuple[str, int, int]:
    return row["distribution"], int(row["clients"]), int(row["seed"])


def read(file: pathlib.Path) -> list[Row]:
    """Reads the results of a study, of which there may be none yet."""
    if not file.exists():
        return []
    with file.open(encoding="utf-8", newline="") as text:
        return list(csv.DictReader(text))


def write(file: pathlib.Path, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Writes some columns of rows, all rows or none of them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    with part.open("w", encoding="utf-8", newline="") as text:
        writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    part.replace(file)


if __name__ == "__main__":
    main()
