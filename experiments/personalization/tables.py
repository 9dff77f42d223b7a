"""Tables and figures of personalisation from run folders: accuracy, bytes, pruning by round."""

import csv
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.sweep import Study
from fedjax_dp.experiment import grid_points
from fedjax_dp.io import drawing, plots

HERE = pathlib.Path(__file__).parent
# Of models after one more round of local training, which an evaluation alone sees.
AFTER = "_after_local"
# Columns of the rounds that a figure is drawn from; accuracies and pruning are shares.
CURVES = (
    *("method", "seed", "round", "bytes up", "pruned"),
    *("mean", "mean, after local", "worst", "worst, after local"),
)
# The pruned share depends on who is in the cohort: a mean over rounds shows its course.
_ROUNDS_OF_A_POINT = 5


def runs_of(study: Study, folder: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    """Reads the runs that there are, by method and data: their summaries and rows of metrics."""
    found: dict[str, list[dict[str, Any]]] = {}
    for point in grid_points(study, {}, []):
        file = folder / point.folder / "summary.json"
        if not file.is_file():
            continue
        summary = json.loads(file.read_text(encoding="utf-8"))
        lines = (file.parent / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        summary["metrics"] = [json.loads(line) for line in lines]
        summary["values"] = point.values
        several = len(study.axes["data"]) > 1
        name = ", ".join(point.values[axis] for axis in ("method", "data")[: 1 + several])
        found.setdefault(name, []).append(summary)
    # One that was interrupted has a summary too.
    most = max((run["rounds"] for group in found.values() for run in group), default=0)
    whole = {m: [run for run in group if run["rounds"] == most] for m, group in found.items()}
    return {method: group for method, group in whole.items() if group}


def bytes_until(rows: Sequence[Mapping[str, Any]], accuracy: float, when: str = "") -> float | None:
    """Counts what was sent up until an evaluation first found such a mean accuracy of clients."""
    sent = 0.0
    for row in rows:
        sent += row["bytes_up"]
        if row.get(f"mean_client_accuracy{when}", -1.0) >= accuracy:
            return sent
    return None


def until_fedavg(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], method: str, when: str = ""
) -> tuple[float, float] | None:
    """Compares with FedAvg, seed by seed: bytes until its last accuracy, and how many times fewer.

    Both are counted until an evaluation first finds that accuracy, of models as they are received
    or after local training.
    """
    of_seed = {
        run["values"]["seed"]: run
        for run in runs.get(", ".join(["FedAvg", *method.split(", ")[1:]]), ())
    }
    pairs = []
    for run in runs[method]:
        fedavg = of_seed.get(run["values"]["seed"])
        if fedavg is None:
            return None
        last = fedavg[f"mean_client_accuracy{when}"]
        sent, own = (bytes_until(each["metrics"], last, when) for each in (run, fedavg))
        if not sent or not own:
            return None
        pairs.append((sent, own / sent))
    return tuple(map(statistics.mean, zip(*pairs, strict=True)))


def as_markdown(study: Study, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Writes a row a method: clients' accuracy received and after training, what was sent."""
    columns = [
        "method",
        *(
            f"{what}, {when}"
            for what in ("mean", "worst client", "spread")
            for when in ("received", "after local")
        ),
        "paper: mean",
        "paper: worst",
        "pruned",
        "MB up, values",
        "MB up, sent",
        "MB until FedAvg's mean, received",
        "MB until FedAvg's mean, after local",
        "seeds",
    ]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for method, group in runs.items():

        def shown(name: str, group: Sequence[Any] = group) -> str:
            numbers = [100 * run[name] for run in group]
            spread = f" ± {statistics.stdev(numbers):.1f}" if len(numbers) > 1 else ""
            return f"{statistics.mean(numbers):.1f}{spread}"

        def printed(name: str, group: Sequence[Any] = group) -> str:
            number = study.published(name, group[0]["values"])
            return "–" if number is None else f"{number:g}"

        def until(when: str, method: str = method) -> str:
            reached = until_fedavg(runs, method, when)
            if reached is None:
                return "–"
            return f"{reached[0] / 1e6:.1f} ({reached[1]:.1f} × fewer)"

        def megabytes(encoding: str, group: Sequence[Any] = group) -> float:
            sent = [run["communication"]["up"]["by_encoding"][encoding] for run in group]
            return statistics.mean(sent) / 1e6

        pruned = [run["metrics"][-1].get("pruned_share") for run in group]
        share = "–" if pruned[0] is None else f"{100 * statistics.mean(pruned):.0f} %"
        cells = [
            method,
            *(
                shown(f"{what}_client_accuracy{when}")
                for what in ("mean", "worst", "std")
                for when in ("", AFTER)
            ),
            printed("mean_client_accuracy"),
            printed("worst_client_accuracy"),
            share,
            f"{megabytes('values'):.1f}",
            f"{megabytes('smallest'):.1f}",
            until(""),
            until(AFTER),
            str(len(group)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def merged(study: Study, earlier: str, new: str) -> str:
    """Puts the rows of two tables together, new ones in the place of earlier ones.

    A dagger after a method's name, which the text below the table explains, is not part of it.
    """
    head = new.splitlines()[:2]
    columns = _cells(head[0])
    rows: dict[str, str] = {}
    for text in (earlier, new):
        lines = [line for line in text.splitlines() if line.startswith("|")]
        for line in lines[2:]:
            # An earlier table may have had fewer columns.
            cells = dict(zip(_cells(lines[0]), _cells(line), strict=True))
            name = cells["method"].removesuffix(" †")
            rows[name] = "| " + " | ".join(cells.get(c, "–") for c in columns) + " |"
    order = list(study.axes["method"])
    names = sorted(rows, key=lambda name: order.index(name.partition(", ")[0]))
    notes = [line for line in earlier.splitlines() if not line.startswith("|")]
    return "\n".join([*head, *(rows[name] for name in names), *notes]) + "\n"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def curves(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, str]]:
    """Lists rounds of runs: bytes until then, the share pruned, mean accuracies if evaluated."""
    found = []
    for name, group in runs.items():
        for run in group:
            sent = 0
            for row in run["metrics"]:
                sent += row["bytes_up"]
                shares = (
                    row.get(key)
                    for key in (
                        "pruned_share",
                        *(
                            f"{which}_client_accuracy{when}"
                            for which in ("mean", "worst")
                            for when in ("", AFTER)
                        ),
                    )
                )
                cells = [
                    name,
                    run["values"]["seed"],
                    str(row["round"]),
                    f"{sent:.0f}",
                    *("" if share is None else f"{share:.4f}" for share in shares),
                ]
                found.append(dict(zip(CURVES, cells, strict=True)))
    return found


def merged_curves(
    study: Study, earlier: Sequence[dict[str, str]], new: Sequence[dict[str, str]]
) -> list[dict[str, str]]:
    """Puts rounds together, new ones in the place of those of the same method and seed."""
    replaced = {(row["method"], row["seed"]) for row in new}
    # Earlier rounds may have had fewer columns.
    rest = [
        {column: row.get(column, "") for column in CURVES}
        for row in earlier
        if (row["method"], row["seed"]) not in replaced
    ]
    order = list(study.axes["method"])

    def place(row: Mapping[str, str]) -> tuple[int, str, int, int]:
        method = row["method"].partition(", ")[0]
        return order.index(method), row["method"], int(row["seed"]), int(row["round"])

    return sorted([*rest, *new], key=place)


def draw(rows: Sequence[Mapping[str, str]], file: pathlib.Path) -> None:
    """Draws pruning by round, and accuracies against bytes: means over seeds of each method."""
    figure = drawing.new_figure(8.6)
    pruning, *panels = figure.subplots(3, 1)
    names = list(dict.fromkeys(row["method"] for row in rows))
    seeds = [len({row["seed"] for row in rows if row["method"] == name}) for name in names]
    for i, name in enumerate(names):
        own = [row for row in rows if row["method"] == name]
        for axes, x, unit, y, num_rounds in (
            (pruning, "round", 1, "pruned", _ROUNDS_OF_A_POINT),
            (panels[0], "bytes up", 1e6, "mean", 1),
            (panels[1], "bytes up", 1e6, "mean, after local", 1),
        ):
            points = [
                (int(row["round"]), row["seed"], float(row[x]) / unit, 100 * float(row[y]))
                for row in own
                if row[y]
            ]
            if points:
                places, means, deviations = _over_seeds(points, num_rounds)
                label = _legend_of(name)
                line = drawing.draw_curve(axes, i, places, means, label)
                drawing.draw_band(axes, line, deviations)
    pruning.set_ylabel("pruned weights\nof the cohort, %")
    pruning.set_ylim(bottom=0)
    drawing.set_lines_below(pruning, f"round (means of {_ROUNDS_OF_A_POINT} rounds)")
    sent = "sent by clients, MB"
    for axes, which in zip(panels, ("as received", "after local training"), strict=True):
        axes.set(xlabel=sent, ylabel=f"mean accuracy of clients\n{which}, %")
    drawing.set_lines_below(panels[1], sent, drawing.words_of_spread(seeds, "bands"))
    for axes in (pruning, *panels):
        axes.grid(alpha=0.25)
    drawing.legend_below(figure, panels[0], columns=2)
    plots.save(figure, file)


def _legend_of(name: str) -> str:
    """Writes FedLTN(0.9;jumpstart) as FedLTN 0.9, Jump-Start; α = 0.5 stays in one line."""
    for key, words in (("(", " "), (")", ""), (";jumpstart", ", Jump-Start"), (";", ", ")):
        name = name.replace(key, words)
    return name.replace("CIFAR-10 α=", "α\u00a0=\u00a0")


def _over_seeds(
    points: Sequence[tuple[int, str, float, float]], num_rounds: int
) -> tuple[list[float], list[float], list[float | None]]:
    """Averages (round, seed, x, y) over so many rounds, then over seeds; deviations if several."""
    of_seed: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for number, seed, x, y in points:
        of_seed.setdefault(((number - 1) // num_rounds, seed), []).append((x, y))
    blocks: dict[int, list[tuple[float, ...]]] = {}
    for (block, _), pairs in of_seed.items():
        blocks.setdefault(block, []).append(_means(pairs))
    by_block = [blocks[block] for block in sorted(blocks)]
    places, means = zip(*map(_means, by_block), strict=True)
    deviations = [
        statistics.stdev(value for _, value in pairs) if len(pairs) > 1 else None
        for pairs in by_block
    ]
    return list(places), list(means), deviations


def _means(pairs: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(map(statistics.mean, zip(*pairs, strict=True)))


def times(study: Study, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, str]]:
    """Lists how long runs took, and how much of it was compilation; not of several together."""
    return [
        {
            "study": study.name,
            "method": name,
            "seed": run["values"]["seed"],
            "rounds": str(run["rounds"]),
            "seconds": f"{run['seconds']:.0f}",
            "seconds compiling": f"{run['seconds_compiling']:.0f}",
        }
        for name, group in runs.items()
        for run in group
        if run["sweep"] == 1
    ]


def _read(file: pathlib.Path) -> list[dict[str, str]]:
    if not file.is_file():
        return []
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def _save(file: pathlib.Path, rows: Sequence[Mapping[str, str]]) -> None:
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write(study: Study, folder: pathlib.Path) -> None:
    """Writes what has run beside the experiment; rows of methods that have not are kept."""
    runs = runs_of(study, folder)
    if not runs:
        return
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    file = results / f"{study.name}.md"
    earlier = file.read_text(encoding="utf-8") if file.is_file() else ""
    table = merged(study, earlier, as_markdown(study, runs))
    file.write_text(table, encoding="utf-8")
    rows = merged_curves(study, _read(file.with_suffix(".csv")), curves(runs))
    _save(file.with_suffix(".csv"), rows)
    # Rounds of the oldest runs were not kept: their figure stays rather than lose their curves.
    named = {_cells(line)[0] for line in table.splitlines()[2:] if line.startswith("|")}
    if named <= {row["method"] for row in rows}:
        draw(rows, file.with_suffix(".png"))
    taken = {
        (row["study"], row["method"], row["seed"]): row
        for row in [*_read(results / "seconds.csv"), *times(study, runs)]
    }
    if taken:
        _save(results / "seconds.csv", [taken[key] for key in sorted(taken)])
