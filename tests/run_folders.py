"""Runs of the command line in this process, and what their folders hold."""

import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from rich.console import Console

from fedjax_dp.cli.output import Output
from fedjax_dp.cli.run import shown
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.components.experiment import Experiment
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.running import run as running
from fedjax_dp.experiment.schema.config import Config
from fedjax_dp.io.logbook import Logbook

# Three clients and few rounds: a run of a few seconds that still takes every turn.
SMALL = ("--data.num_clients=3", "--run.rounds=2")
# Noise at records and at the server, cohorts and batches drawn at random, an evaluation between
# two checkpoints and one that is not: all that a resumed run could draw differently.
ROUNDS, EVERY = 8, 3
DRAWN = (
    *(SMALL[0], f"--run.rounds={ROUNDS}", f"--run.checkpoint_every={EVERY}"),
    *("--run.evaluate_every=2", "--privacy.unit=both", "--algorithm.name=dp_fedavg"),
    *("--participation.sampler=poisson", "--participation.cohort_size=2"),
    *("--execution.clients_per_chunk=1", "--execution.devices=1"),
)
NOT_PRIVATE = ("--privacy.unit=none", "--algorithm.name=fedavg")

ENTRY = "from fedjax_dp.cli.main import main; main()"

_assembled: dict[str, Experiment] = {}


def assemble_once(config: Config) -> Experiment:
    """Assembles experiments once that differ in name, secrecy of the root and release alone."""
    own = {name: getattr(config.run, name) for name in ("name", "secret", "release")}
    run = config.run.model_copy(update={"name": None, "secret": False, "release": None})
    plain = config.model_copy(update={"run": run})
    text = config_files.to_toml(plain)
    if text not in _assembled:
        found = assemble(plain)
        # A run that resumes names the layout that it had found.
        _assembled[text] = _assembled[config_files.to_toml(found.config)] = found
    found = _assembled[text]
    settled = found.config.run.model_copy(update=own)
    return found._replace(config=found.config.model_copy(update={"run": settled}))


def execute(folder: pathlib.Path, *words: str, resume: bool = False) -> tuple[int, str]:
    """Runs an experiment in this process; gives its exit status and what it printed."""
    file = folder / "config.toml" if resume else None
    text = io.StringIO()
    config = load_config(file, words)

    def start(watcher: running.Watcher) -> running.Outcome:
        if resume:
            return running.resume(folder, watcher, words=words)
        return running.run(config, folder, watcher)

    console = Console(file=text, soft_wrap=True)
    out = Output(console, console)
    answer = shown(config, start, out)
    answer.show(out)
    return answer.status, text.getvalue()


class TouchedError(AssertionError):
    """Something was done that a refusal should have come before."""


class Killed(BaseException):
    """Stands for a signal that no code can answer."""


@contextlib.contextmanager
def dying_after(round_index: int) -> Iterator[None]:
    """Requires that a run in this process dies, which it does once a round is logged."""
    write = Logbook.write

    def dying(self: Logbook, row: Any) -> None:
        write(self, row)
        if row["round"] == round_index:
            raise Killed

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Logbook, "write", dying)
        yield


def run_until_death(folder: pathlib.Path, round_index: int, *words: str, **options: Any) -> None:
    """Runs an experiment in this process that dies once a round is logged."""
    with dying_after(round_index):
        execute(folder, *words, **options)


def die_and_resume(folder: pathlib.Path, round_index: int, *words: str) -> None:
    """Runs an experiment that dies once a round is logged, and resumes it to its end."""
    run_until_death(folder, round_index, *words)
    assert execute(folder, resume=True)[0] == 0


def command(*words: str, program: str = ENTRY, cache: str = "") -> list[str]:
    """Gives the command line of a process of its own, its compiled programs kept in `cache`."""
    if cache:
        setting = f"os.environ['JAX_COMPILATION_CACHE_DIR'] = {cache!r}"
        program = f"import os; {setting}; {program}"
    return [sys.executable, "-c", program, *words]


def in_subprocess(*words: str, **options: Any) -> subprocess.CompletedProcess:
    """Runs the command in a process of its own, to its end."""
    environment = os.environ | {"COLUMNS": "200"}
    return subprocess.run(
        command(*words, **options), capture_output=True, text=True, env=environment, timeout=300
    )


def read_json(folder: pathlib.Path, name: str) -> Any:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def metrics(folder: pathlib.Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def saved_arrays(folder: pathlib.Path) -> tuple[int, dict[str, np.ndarray], dict[str, Any]]:
    """Reads the newest checkpoint with Orbax alone: its round, its arrays, what lies beside."""
    with ocp.CheckpointManager((folder / "checkpoint").absolute()) as manager:
        step = manager.latest_step()
        part = epath.Path((folder / "checkpoint" / str(step) / "state").absolute())
        kept = ocp.StandardCheckpointHandler().metadata(part).tree
        # On the host, whatever the devices that wrote them.
        arrays = {name: np.zeros(each.shape, each.dtype) for name, each in kept.items()}
        saved = manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(arrays), extra=ocp.args.JsonRestore()
            ),
        )
    return step, saved["state"], saved["extra"]


def assert_same_run(
    folder: pathlib.Path, other: pathlib.Path, besides: tuple[str, ...] = ()
) -> None:
    """Requires two folders to hold one run, bit for bit, but for its time and `besides`."""
    step, arrays, extra = saved_arrays(folder)
    other_step, other_arrays, other_extra = saved_arrays(other)
    assert step == other_step
    assert arrays.keys() == other_arrays.keys()
    for name, array in arrays.items():
        assert array.dtype == other_arrays[name].dtype
        assert np.asarray(array).tobytes() == np.asarray(other_arrays[name]).tobytes(), name
    assert extra["ledgers"] == other_extra["ledgers"]
    for name in {"metrics.jsonl", "privacy.json", "privacy.md", "config.toml"} - set(besides):
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    released = [sorted((f / "release").rglob("*")) for f in (folder, other)]
    for mine, theirs in zip(*released, strict=True):
        assert mine.name == theirs.name
        may_differ = mine.name in {"environment.json", *besides}
        assert may_differ or mine.read_bytes() == theirs.read_bytes(), mine
    left, right = read_json(folder, "summary.json"), read_json(other, "summary.json")
    for name in left.keys() | right.keys():
        may_differ = name.startswith("seconds") or name in besides
        assert may_differ or left[name] == right[name], name
