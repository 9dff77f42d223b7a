"""Callbacks that send the metrics of a run to an experiment tracker: MLflow, W&B, Trackio.

What they send is exact, and no ε covers it: those who see a tracker's pages count as trusted.
"""

import atexit
import importlib
import math
import queue
import threading
import uuid
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Literal, NamedTuple

from fedjax_dp.core import checks, files
from fedjax_dp.core.packages import needed_for
from fedjax_dp.experiment.components.experiment import Callback, Progress
from fedjax_dp.io.logbook import FAILED, write_json

# Holds the identity of a run by tracker, so that a resumed run continues there too, and below
# `_SENT` the last round that each tracker has.
TRACKERS_FILE = "trackers.json"
_SENT = "last_round"
# The length that MLflow allows for a parameter.
_LONGEST = 6000
# Seconds that a call of a tracker may take.
_PATIENCE = 30.0
_Config = dict[str, Any]


class _Tracked(NamedTuple):
    """A run at a tracker: `log` takes numbers by name and the round, `finish` ends the run."""

    log: Callable[[Mapping[str, float], int], Any]
    finish: Callable[[], Any]


class _Service:
    """Calls functions of one tracker in a thread of its own, until one of them fails or hangs."""

    def __init__(self, name: str):
        self._name, self._is_lost = name, False
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], list[object]]]
        self._calls, self._done = queue.SimpleQueue(), threading.Event()
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], object], warn: Callable[[str], None]) -> None:
        """Calls a function and waits for it; warns of a failure, and calls nothing after it."""
        if self._is_lost:
            return
        if self._thread is None:
            # A daemon: one that hangs must not hold up the end of the process.
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        failures: list[object] = []
        self._done.clear()
        self._calls.put((function, failures))
        if not self._done.wait(_PATIENCE):
            failures.append(f"no answer within {_PATIENCE:g} seconds")
        if failures:
            self._is_lost = True
            warn(f"{self._name} {FAILED}: {failures[0]}")

    def _work(self) -> None:
        while True:
            function, failures = self._calls.get()
            try:
                function()
            except BaseException as error:
                failures.append(f"{type(error).__name__}: {error}")
            self._done.set()


def mlflow(*, experiment: str = "fedjax_dp", tracking_uri: str | None = None) -> Callback:
    """Sends metrics to MLflow.

    Args:
      experiment: name of the experiment that holds the run; it is made where it is missing.
      tracking_uri: server or database, such as "sqlite:///mlflow.db"; MLflow's own default if
        None.

    Returns:
      The callback. It stops no run.

    Raises:
      MissingPackageError: without the extra `mlflow`.
    """
    _package("mlflow")
    tracking = importlib.import_module("mlflow.tracking")

    def start(name: str, identity: str, config: _Config) -> _Tracked:
        client = tracking.MlflowClient(tracking_uri)
        found = client.get_experiment_by_name(experiment)
        place = client.create_experiment(experiment) if found is None else found.experiment_id
        runs = client.search_runs([place], f"tags.fedjax_dp = '{identity}'")
        if runs:
            run_id = runs[0].info.run_id
            client.update_run(run_id, "RUNNING")
        else:
            run = client.create_run(place, tags={"fedjax_dp": identity}, run_name=name)
            run_id = run.info.run_id
            for key, value in config.items():
                client.log_param(run_id, key, str(value)[:_LONGEST])

        def log(values: Mapping[str, float], round_index: int) -> None:
            for key, value in values.items():
                client.log_metric(run_id, key, value, step=round_index)

        return _Tracked(log, lambda: client.set_terminated(run_id))

    return _tracking("mlflow", start)


def wandb(
    *,
    project: str = "fedjax_dp",
    entity: str | None = None,
    mode: Literal["online", "offline"] = "online",
) -> Callback:
    """Sends metrics to Weights & Biases.

    Args:
      project: name of the project.
      entity: user or team; that of the login if None.
      mode: "online", or "offline" to write files for a later `wandb sync`.

    Returns:
      The callback. It stops no run.

    Raises:
      MissingPackageError: without the extra `wandb`.
    """
    package = _package("wandb")

    def start(name: str, identity: str, config: _Config) -> _Tracked:
        run = package.init(
            project=project,
            entity=entity,
            mode=mode,
            name=name,
            id=identity,
            resume="allow",
            config=config,
            # Runs of a sweep are open side by side.
            reinit="create_new",
        )
        run.define_metric("*", step_metric="round")

        def log(values: Mapping[str, float], round_index: int) -> None:
            run.log({"round": round_index, **values})

        return _Tracked(log, run.finish)

    return _tracking("wandb", start)


def trackio(*, project: str = "fedjax_dp", space_id: str | None = None) -> Callback:
    """Sends metrics to Trackio, which stores them on this machine.

    Args:
      project: name of the project; `trackio show --project NAME` shows it.
      space_id: a Hugging Face Space that stores them instead, as "owner/name".

    Returns:
      The callback. It stops no run.

    Raises:
      MissingPackageError: without the extra `trackio`.
    """
    package = _package("trackio")

    def start(name: str, identity: str, config: _Config) -> _Tracked:
        run = package.init(
            project=project,
            name=f"{name}-{identity[:8]}",
            space_id=space_id,
            config=config,
            resume="allow",
            embed=False,
        )
        return _Tracked(lambda values, round_index: run.log(dict(values), round_index), run.finish)

    return _tracking("trackio", start)


def _package(name: str) -> ModuleType:
    """Imports a tracker, whose extra has its name."""
    with needed_for(f"the callback {name}", name):
        return importlib.import_module(name)


def _tracking(tracker: str, start: Callable[[str, str, _Config], _Tracked]) -> Callback:
    """Sends each row of metrics once, and ends the tracker's run with the last round.

    A resumed run starts after the last round that was sent, which may be after its checkpoint:
    rounds that are run again have the same values. A tracker that fails or does not answer gets
    nothing more, with a warning; what it lacks it gets if the run is resumed.
    """
    service, opened, last_sent = _Service(f"the tracker {tracker}"), list[_Tracked](), 0

    def finish(warn: Callable[[str], None] = warnings.warn) -> None:
        if opened:
            service.call(opened.pop().finish, warn)
        atexit.unregister(finish)

    def send(progress: Progress) -> None:
        nonlocal last_sent
        if not opened:
            identity, last_sent = _identity(tracker, progress)
            opened.append(start(progress.folder.name, identity, _settings(progress)))
            # A run that ends early, by its budget, another callback or a signal.
            atexit.register(finish)
        for row in [row for row in progress.rows if row["round"] > last_sent]:
            numbers = {key: value for key, value in row.items() if _is_finite(value)}
            number = numbers.pop("round")
            opened[0].log(numbers, number)
            last_sent = number
        _note_sent(tracker, progress, last_sent)

    def call(progress: Progress) -> None:
        service.call(lambda: send(progress), progress.warn)
        if progress.rows[-1]["round"] >= progress.experiment.config.run.rounds:
            finish(progress.warn)

    # It decides nothing, so that it reveals nothing through when a run ends.
    return Callback(call, is_private=True)


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _known(progress: Progress) -> dict[str, Any]:
    """Reads what trackers know of the run."""
    path = progress.folder / TRACKERS_FILE
    known = files.parse_json(files.read_text(path), path) if path.is_file() else {}
    known = files.without_digest(known, path)
    rule = "be a table of identities and rounds"
    is_known = isinstance(known.get(_SENT, {}), dict)
    checks.require(is_known, str(path), rule, known)
    return known


def _identity(tracker: str, progress: Progress) -> tuple[str, int]:
    """Reads the run's identity at a tracker, or draws and writes one, and its last sent round."""
    known = _known(progress)
    if tracker not in known:
        known[tracker] = uuid.uuid4().hex
        write_json(progress.folder / TRACKERS_FILE, files.with_digest(known))
    return known[tracker], known.get(_SENT, {}).get(tracker, 0)


def _note_sent(tracker: str, progress: Progress, last_sent: int) -> None:
    """Writes down the last round that a tracker has."""
    known = _known(progress)
    known[_SENT] = known.get(_SENT, {}) | {tracker: last_sent}
    write_json(progress.folder / TRACKERS_FILE, files.with_digest(known))


def _settings(progress: Progress) -> _Config:
    """Flattens the configuration, without the seed where noise is drawn from it."""
    config = progress.experiment.config
    flat: _Config = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{prefix}.{key}" if prefix else key, inner)
        elif value is not None:
            flat[prefix] = value

    add("", config.model_dump(mode="json"))
    if not config.run.secret:
        del flat["run.seed"]
    return flat
