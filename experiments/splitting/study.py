"""The convex figures of chapter 2: runs, findings, pictures.

python -m experiments.splitting.study [--output FOLDER] [--only FIGURE …]
"""

import argparse
import functools
import json
import os
import pathlib
import platform
import time

import numpy as np
from rich.console import Console

from experiments.splitting import findings, pictures
from experiments.splitting.curves import run
from experiments.splitting.grid import Group, groups
from experiments.splitting.problems import Problem, least_squares_problem, logistic_problem

# Rounds of a curve that are kept: the first ones, then ever fewer.
KEPT = np.unique(np.round(np.geomspace(1, 6001, 400)).astype(int) - 1)


@functools.cache
def problem_of(name: str, sigma: float) -> Problem:
    """Builds each problem once."""
    return least_squares_problem(sigma) if name == "ls" else logistic_problem()


def computed(group: Group) -> dict:
    """Runs one group; numbers with five digits."""
    problem = problem_of(group.problem, group.sigma)
    start = time.perf_counter()
    found = run(problem, group.setting, list(group.curves.values()))
    seconds = time.perf_counter() - start
    rounds = [int(r) for r in KEPT if r < group.setting.num_rounds]
    if rounds[-1] != group.setting.num_rounds - 1:
        rounds.append(group.setting.num_rounds - 1)
    return {
        "group": described(group),
        "H": problem.heterogeneity,
        "seconds": round(seconds, 2),
        "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "rounds": rounds,
        "curves": {
            label: {
                **{kind: [float(f"{v[r]:.5g}") for r in rounds] for kind, v in own.items()},
                "reached": findings.first_rounds(own["gap"]),
            }
            for label, own in zip(group.curves, found, strict=True)
        },
    }


def described(group: Group) -> dict:
    """A group as JSON holds it."""
    plain = {**group._asdict(), "setting": group.setting._asdict()}
    return json.loads(json.dumps(plain))


def main(arguments: list[str] | None = None) -> None:
    """Runs what is missing in a folder, then writes findings and pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/splitting"))
    parser.add_argument("--only", nargs="+", metavar="FIGURE", help="such as 2.2 2.8 B.1")
    parser.add_argument("--limit", type=int, help="so many groups at most, for a trial")
    options = parser.parse_args(arguments)
    folder = options.output / "curves"
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    todo = [g for g in groups() if not options.only or g.figure.split()[0] in options.only]
    todo = todo[: options.limit]
    for i, group in enumerate(todo, 1):
        path = folder / f"{group.name}.json"
        label = f"[{i}/{len(todo)}] figure {group.figure}: {group.name}"
        if path.exists() and json.loads(path.read_text())["group"] == described(group):
            console.print(f"{label} is there", markup=False)
            continue
        result = computed(group)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(result, ensure_ascii=False))
        part.replace(path)
        console.print(f"{label}: {result['seconds']:.1f} s", markup=False)
    results = [json.loads((folder / f"{g.name}.json").read_text()) for g in todo]
    text = findings.as_markdown(results)
    (options.output / "findings.md").write_text(text)
    pictures.draw(results, options.output)
    total = sum(result["seconds"] for result in results)
    console.print(f"\n{text}\n{len(results)} groups, {total / 60:.1f} minutes", markup=False)


if __name__ == "__main__":
    main()
