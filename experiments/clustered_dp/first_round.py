"""The first round of R-DPCFL alone: `python -m experiments.clustered_dp.first_round`.

Figures 5, 8 and 9 of the paper, C.2, D.5, D.6 and E.7 (left) of the thesis, on the small MNIST
setting: batch sizes of the first round b¹ and of later ones b^{>1}, budgets and data set sizes, one
at a time. A mixture of each size M is fitted to the updates of a round. `mixtures.csv` has its MSS,
its EM steps, and whether its clusters are the true ones; `distances.csv` the distances of the true
clusters' mean updates in a round without noise. An interrupted run resumes.
"""

import argparse
import contextlib
import csv
import itertools
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure

from experiments import noise_levels, study_plots
from experiments.clustered_dp.grid import true_clusters
from experiments.clustered_dp.pictures import SEPARATION
from experiments.heterogeneous_dp.first_round import write
from fedjax_dp.engine import examples_of
from fedjax_dp.evaluation import is_partition_found
from fedjax_dp.experiment import Config, assemble, load_config
from fedjax_dp.experiment.running.starting import new_root
from fedjax_dp.io import drawing, plots
from fedjax_dp.server.clustering import Similarity, fit_mixture, principal_features

HERE = pathlib.Path(__file__).parent
SIZES = (600, 300)
FIRST, LATER, EPSILONS = (32, 64, 128, 256), (16, 32, 64, 128), (15.0, 10.0, 5.0, 4.0, 3.0)
MODELS = range(2, 11)
Row = dict[str, Any]


class Point(NamedTuple):
    """Examples of a client, batch sizes of the first round and later, budget, and features."""

    num_examples: int = SIZES[0]
    first: int = SIZES[0]
    later: int = 32
    epsilon: float = 10.0
    components: int = 2


def points() -> list[Point]:
    """Lists the points of all figures, each once."""
    found = [Point(first=first) for first in FIRST] + [Point(later=later) for later in LATER]
    found += [
        Point(size, size, later, epsilon)
        for size, later, epsilon in itertools.product(SIZES, (16, 32), EPSILONS)
    ]
    # Two components are the authors' choice; four clusters span three.
    found += [Point(epsilon=epsilon, components=3) for epsilon in EPSILONS]
    return list(dict.fromkeys(found))


def setting(num_examples: int, seed: int) -> Config:
    """The configuration of a data set size."""
    options = {"num_models": 4, "first_batch_size": num_examples}
    words = [f"--algorithm.options.{name}={value}" for name, value in options.items()]
    samples = f"--data.partition_options.samples_per_client={num_examples}"
    file = HERE / "mnist_two_cores.toml"
    return load_config(file, (*words, samples, f"--run.seed={seed}", "--algorithm.name=r_dpcfl"))


def noise_multiplier(point: Point, config: Config) -> float:
    """The noise of a whole run of these batches, without private choices."""
    record = config.privacy.record
    found = noise_levels.noise_multiplier_of_run(
        point.epsilon,
        record.dp_delta,
        point.num_examples,
        point.later,
        num_rounds=config.run.rounds,
        first_batch_size=point.first,
        accountant=config.privacy.accountant,
    )
    return float(found)


class FirstRounds:
    """First rounds of a data set size, of all seeds by one compiled program."""

    def __init__(self, num_examples: int):
        self.num_examples = num_examples
        self.run_round: Callable[..., Any] | None = None
        self.seed: int | None = None

    def run(self, seed: int, first: int, z: float) -> Similarity:
        """Returns the inner products of updates with first batches and a noise multiplier."""
        if seed != self.seed:
            config = setting(self.num_examples, seed)
            built, self.seed, self.key = assemble(config), seed, new_root(config.run)
            self.bound = built.simulation.federation
            self.examples = examples_of(built.population.train)
        self.run_round = self.run_round or jax.jit(self.bound.run_round)
        hyper = self.bound.hyper
        hyper = hyper._replace(
            algorithm=hyper.algorithm | {"first_batch_size": np.float32(first)},
            local=hyper.local._replace(noise_multiplier=np.float32(z)),
        )
        state, *_ = self.run_round(self.bound.init(self.key), hyper, self.examples, self.key)
        return jax.device_get(state.server.similarity)


def mixtures(
    similarity: Similarity, true: np.ndarray, seed: int, num_components: int = 2
) -> Iterator[Row]:
    """Fits a mixture of each size to principal components of the updates."""
    features = principal_features(similarity, num_components)
    for count in MODELS:
        mixture = fit_mixture(features, count, seed)
        assigned = np.argmax(mixture.responsibilities, axis=1)
        yield {
            "models": count,
            "separation": mixture.separation,
            "steps": mixture.num_iterations,
            "found": int(is_partition_found(assigned, true)),
        }


def distances(similarity: Similarity, true: np.ndarray) -> Iterator[Row]:
    """Computes the distance of mean updates of each pair of true clusters."""
    share = np.stack([(true == c) / np.sum(true == c) for c in np.unique(true)])
    for a, b in itertools.combinations(range(len(share)), 2):
        between = share[a] - share[b]
        squared = between @ np.asarray(similarity.scatter, np.float64) @ between
        yield {"pair": f"{a}-{b}", "distance": float(np.sqrt(max(squared, 0.0)))}


def run(
    seeds: Sequence[int], output: pathlib.Path, seconds: float = float("inf")
) -> tuple[list[Row], list[Row]]:
    """Runs the points that the files do not have, none later than some seconds after the call.

    Draws the updates of the first seed with the smallest and with the largest b¹ (figure 5).
    """
    started = time.perf_counter()
    files = output / "mixtures.csv", output / "distances.csv"
    found, apart = map(read, files)
    rounds = {size: FirstRounds(size) for size in SIZES}
    noisy = [(seed, point) for seed in seeds for point in points()]
    clear = [(seed, Point(first=first)) for seed in seeds for first in (*FIRST, SIZES[0])]
    there = {(row["seed"], Point(*(row[name] for name in Point._fields))) for row in found}
    # A round without noise has neither a budget nor later batches.
    there_clear = {(row["seed"], Point(first=row["first"])) for row in apart}
    jobs = [(*job, True) for job in noisy if job not in there]
    jobs += [(*job, False) for job in clear if job not in there_clear]
    for seed, point, is_noisy in sorted(jobs, key=lambda job: job[0]):
        if time.perf_counter() - started > seconds:
            break
        config = setting(point.num_examples, seed)
        z, true = noise_multiplier(point, config) if is_noisy else 0.0, true_clusters(config)
        similarity = rounds[point.num_examples].run(seed, point.first, z)
        if not is_noisy:
            row = {"first": point.first, "seed": seed}
            apart += [row | one for one in distances(similarity, true)]
            write(files[1], apart)
            continue
        row = point._asdict() | {"seed": seed, "noise_multiplier": z}
        found += [row | one for one in mixtures(similarity, true, seed, point.components)]
        write(files[0], found)
        if seed == seeds[0] and point in (Point(), Point(first=FIRST[0])):
            plots.save(scatter(similarity, true, point, seed), output / _name(point))
        print(f"seed {seed}, {point}", flush=True)
    return found, apart


def read(path: pathlib.Path) -> list[Row]:
    """Reads rows of a CSV file; none if it is not there."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [{k: _number(v) for k, v in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> float | int | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _name(point: Point) -> str:
    return f"updates,first={point.first}.png"


def scatter(similarity: Similarity, true: np.ndarray, point: Point, seed: int) -> Figure:
    """Draws updates and the mixture of as many components as there are clusters."""
    features = principal_features(similarity, 2)
    mixture = fit_mixture(features, len(np.unique(true)), seed)
    title = f"First batches of {point.first}, {SEPARATION} {mixture.separation:.1f}"
    return study_plots.updates_and_mixture(features, true, mixture.means, mixture.radii, title)


def curve(rows: Iterable[Row], x: str, y: str) -> tuple[list[float], list[float], list[float]]:
    """Averages over rows of the same x: its values, means of y, and deviations (n - 1)."""
    found: dict[float, list[float]] = {}
    for row in rows:
        found.setdefault(row[x], []).append(row[y])
    places = sorted(found)
    spread = [float(np.std(found[p], ddof=1)) if len(found[p]) > 1 else 0.0 for p in places]
    return places, [float(np.mean(found[p])) for p in places], spread


def bands(curves: dict[str, Any], title: str, x: str, y: str, num_seeds: int) -> Figure:
    """Draws curves with bands of one deviation over seeds."""
    figure = study_plots.accuracy_by_round(curves, title, label=y)
    axes = figure.axes[0]
    axes.set_ylim(bottom=0)
    drawing.set_lines_below(axes, x, drawing.words_of_spread([num_seeds], "band"))
    return figure


def draw(found: Sequence[Row], apart: Sequence[Row]) -> dict[str, Figure]:
    """Draws figures 8 and 9, C.2, D.5, D.6 and E.7 by file name."""
    size, four = SIZES[0], [row for row in found if row["models"] == 4]
    base = Point()._asdict()

    def where(rows: Sequence[Row], **given: Any) -> list[Row]:
        fixed = base | given
        return [r for r in rows if all(r[k] == v for k, v in fixed.items() if v is not None)]

    by_first = where(four, first=None)
    by_later = where(four, later=None)
    by_budget = {
        f"{n} images, later batches of {later}": curve(
            where(four, num_examples=n, first=n, later=later, epsilon=None), "epsilon", "separation"
        )
        for n, later in itertools.product(SIZES, (32, 16))
    }
    pairs = sorted({row["pair"] for row in apart})
    by_pair = {
        "clusters " + pair.replace("-", " and "): curve(
            (r for r in apart if r["pair"] == pair), "first", "distance"
        )
        for pair in pairs
    }
    first, later = "batch size of the first round $b^1$", "later batch size $b^{>1}$"
    apart_by = f"{SEPARATION} (MSS)"
    full = "Full first batches"
    # One curve needs no name.
    shown = {
        "steps": ({"": curve(by_first, "first", "steps")}, "ε = 10", first, "steps of EM"),
        "separation_by_later": (
            {"": curve(by_later, "later", "separation")},
            f"{full}, ε = 10",
            later,
            apart_by,
        ),
        "separation_by_epsilon": (by_budget, full, "ε", apart_by),
        "distances": (
            by_pair,
            f"No noise, {size} images a client",
            first,
            "distance of mean updates",
        ),
    }
    for count in (2, 3):
        by_models = {
            f"ε = {e:g}": curve(where(found, epsilon=e, components=count), "models", "separation")
            for e in EPSILONS
        }
        about = f"{full}, {count} principal components"
        words = "components of the mixture, M", apart_by
        shown[f"separation_by_models,components={count}"] = by_models, about, *words
    num_seeds = len({row["seed"] for row in found})
    figures = {name: bands(*parts, num_seeds) for name, parts in shown.items()}
    lowest = min(min(means) for _, means, _ in by_pair.values())
    figures["distances"].axes[0].set(yscale="log", ylim=(lowest / 1.5, None))
    ticks = {"steps": (*FIRST, size), "distances": (*FIRST, size), "separation_by_later": LATER}
    for name, places in ticks.items():
        axes = figures[name].axes[0]
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_xticks(places, [str(place) for place in places])
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/first_round"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing later")
    known = parser.parse_args(arguments)
    found, apart = run(known.seeds, known.output, known.seconds)
    for name, figure in draw(found, apart).items():
        plots.save(figure, known.output / f"{name}.png")


if __name__ == "__main__":
    main()
