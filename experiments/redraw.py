"""Draws the pictures of results anew from what is stored beside them, without any run.

python -m experiments.redraw [NAME ...]

What is drawn while it runs needs its own command: accuracy and norms by round of `user_level_dp`,
estimates of colluders of `secure_aggregation`, and updates of the first round of `clustered_dp`.
"""

import argparse
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.peers import report
from experiments.clustered_dp import figures as clustered_figures
from experiments.clustered_dp import first_round as clustered_round
from experiments.clustered_dp import pictures as clustered_pictures
from experiments.clustered_dp import study as clustered_study
from experiments.generalization import figures as generalization_figures
from experiments.heterogeneous_dp import figures as heterogeneous_figures
from experiments.heterogeneous_dp import first_round as heterogeneous_round
from experiments.personalization import tables
from experiments.secure_aggregation import adult, asynchronous, colluders, privacyfl, released
from experiments.splitting import pictures
from experiments.splitting.grid import groups
from experiments.user_level_dp import figures as user_level
from fedjax_dp.io import plots

HERE = pathlib.Path(__file__).parent
_BENCHMARKS = HERE.parent / "benchmarks" / "results"


def _json(file: pathlib.Path) -> Any:
    return json.loads(file.read_text("utf-8"))


def peers() -> None:
    """Draws the speed of packages."""
    report.plot(_BENCHMARKS / "peers.png", report.read_csv(_BENCHMARKS / "peers.csv"))


def clustered() -> None:
    """Draws noise levels, separations by setting, and accuracy by ε with mixtures."""
    folder = HERE / "clustered_dp" / "results"
    clustered_figures.main(["--output", str(folder / "figures")])
    stored = [folder / "first_round" / f"{name}.csv" for name in ("mixtures", "distances")]
    for name, figure in clustered_round.draw(*map(clustered_round.read, stored)).items():
        plots.save(figure, folder / "first_round" / f"{name}.png")
    ran = folder / "mnist_two_cores"
    for name, figure in clustered_pictures.draw(clustered_study.read_results(ran)).items():
        # Of the mixtures a few are kept.
        if (ran / f"{name}.png").is_file():
            plots.save(figure, ran / f"{name}.png")


def heterogeneous() -> None:
    """Draws noise levels, accuracy by round, clients and claims, weights and spectra."""
    folder = HERE / "heterogeneous_dp" / "results"
    words = ["--output", "figures", "--precision", "block_size", "--rates", "rates"]
    paths = [word if word.startswith("--") else str(folder / word) for word in words]
    heterogeneous_figures.main(paths)
    first = ["--output", str(folder / "first_round"), "--draw"]
    heterogeneous_round.main(first)
    heterogeneous_round.main([*first, "--skewed"])


def generalization_() -> None:
    """Draws accuracy by clients, epochs, rounds and thresholds."""
    generalization_figures.main([])


def personalization() -> None:
    """Draws pruning and accuracy by bytes of the studies whose rounds are stored."""
    for name in ("many", "mixtures", "two_classes"):
        file = HERE / "personalization" / "results" / f"{name}.csv"
        tables.draw(generalization_figures.read_rows(file), file.with_suffix(".png"))


def secure_aggregation() -> None:
    """Draws accuracy by ε, by round, by iteration and by seconds, and r² of attacks."""
    folder = HERE / "secure_aggregation" / "results"
    runs = _json(folder / "adult.json")["runs"]
    plots.save(adult.draw_levels(runs), folder / "adult.png")
    plots.save(adult.draw_rounds(runs, (5e-4, 5e-6, 5e-7)), folder / "adult_2_4b.png")
    plots.save(colluders.draw(_json(folder / "collusion.json")), folder / "collusion.png")
    plots.save(asynchronous.draw(_json(folder / "asynchronous.json")), folder / "asynchronous.png")
    plots.save(privacyfl.draw(_json(folder / "privacyfl.json")["sweep"]), folder / "privacyfl.png")
    stored = [folder / f"released_{name}.csv" for name in ("growing", "serverless")]
    plots.save(released.draw(*map(heterogeneous_round.read, stored)), folder / "released.png")


def splitting() -> None:
    """Draws gaps to the minimum."""
    folder = HERE / "splitting" / "results"
    pictures.draw([_json(folder / "curves" / f"{g.name}.json") for g in groups()], folder)


def user_level_dp() -> None:
    """Draws accuracy by the axis of each sweep."""
    for table in sorted((HERE / "user_level_dp" / "results").glob("*/table.csv")):
        if any(table.parent.glob("accuracy_by_*.png")):
            user_level.draw_table(table, table.parent)


PARTS: dict[str, Callable[[], None]] = {
    "peers": peers,
    "clustered_dp": clustered,
    "heterogeneous_dp": heterogeneous,
    "generalization": generalization_,
    "personalization": personalization,
    "secure_aggregation": secure_aggregation,
    "splitting": splitting,
    "user_level_dp": user_level_dp,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws the named parts, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PARTS)}")
    names = parser.parse_args(arguments).names
    if unknown := set(names) - set(PARTS):
        parser.error(f"NAME must be of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    for name in names or PARTS:
        PARTS[name]()
        print(name, flush=True)


if __name__ == "__main__":
    main()
