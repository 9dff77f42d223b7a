"""The convex figures of chapter 2: runs, findings, pictures.

python -m experiments.splitting.study [--output FOLDER] [--only FIGURE …]
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import platform
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import numpy as np
from rich.console import Console

from experiments.splitting import findings, pictures
from experiments.splitting.curves import Group, Setting, run
from experiments.splitting.grid import groups, longer
from experiments.splitting.problems import problem_of

# Rounds of a curve that are kept: the first ones, then ever fewer.
KEPT = np.unique(np.round(np.geomspace(1, 6001, 150)).astype(int) - 1)


def computed(group: Group) -> dict[str, Any]:
    """Runs one group; numbers with five digits."""
    start = time.perf_counter()
    found = run(group)
    seconds = time.perf_counter() - start
    last = group.setting.num_rounds - 1
    rounds = [int(r) for r in KEPT if r < last] + [last]
    return {
        "group": described(group),
        "H": problem_of(*group.setting[:2]).heterogeneity,
        "seconds": round(seconds, 2),
        "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "rounds": rounds,
        "curves": {
            label: {
                **{kind: [float(f"{v[r]:.5g}") for r in rounds] for kind, v in own.items()},
                "reached": findings.first_rounds(own["gap"]),
            }
            for label, own in found.items()
        },
    }


def described(group: Group) -> dict[str, Any]:
    """A group as JSON holds it."""
    plain = {**group._asdict(), "setting": group.setting._asdict()}
    return json.loads(json.dumps(plain))


def is_done(group: Group, folder: pathlib.Path) -> bool:
    """Returns whether a group's curves are in a folder."""
    path = folder / f"{group.name}.json"
    return path.exists() and json.loads(path.read_text("utf-8"))["group"] == described(group)


def compute_all(batch: Sequence[Group], folder: pathlib.Path) -> list[str]:
    """Runs groups that share a program, and says how long each took."""
    lines = []
    for group in batch:
        result = computed(group)
        part = folder / f"{group.name}.part"
        part.write_text(json.dumps(result, ensure_ascii=False) + "\n", "utf-8")
        part.replace(folder / f"{group.name}.json")
        lines.append(f"figure {group.figure}: {group.name}, {result['seconds']:.1f} s")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is missing in a folder, then writes findings and pictures of all it has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/splitting"))
    parser.add_argument("--only", nargs="+", metavar="FIGURE", help="such as 2.2 2.8 B.1")
    parser.add_argument("--processes", type=int, default=2, help="that share the work")
    options = parser.parse_args(arguments)
    folder, console, started = options.output / "curves", Console(), time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    every = [*groups(), *longer()]
    wanted = [g for g in every if not options.only or g.figure.split()[0] in options.only]
    batches: dict[Setting, list[Group]] = {}
    for group in wanted:
        if not is_done(group, folder):
            batches.setdefault(group.setting, []).append(group)
    done = len(wanted) - sum(map(len, batches.values()))
    # Those of logistic regression take longest, and begin.
    order = sorted(batches, key=lambda setting: setting.problem)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        jobs = [pool.submit(compute_all, batches[setting], folder) for setting in order]
        for job in as_completed(jobs):
            for line in job.result():
                done += 1
                console.print(f"[{done}/{len(wanted)}] {line}", markup=False)
    kept = [group for group in every if is_done(group, folder)]
    results = [json.loads((folder / f"{g.name}.json").read_text("utf-8")) for g in kept]
    text = findings.as_markdown(results)
    (options.output / "findings.md").write_text(text, "utf-8")
    pictures.draw(results, options.output)
    minutes = (time.perf_counter() - started) / 60
    console.print(f"\n{text}\n{len(results)} groups, {minutes:.1f} minutes", markup=False)


if __name__ == "__main__":
    main()
