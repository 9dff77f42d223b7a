"""The folder that a node and a training script share, for each of the two."""

import contextlib
import json
import math
import os
import pathlib
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors
from filelock import FileLock
from flwr.app import Context
from safetensors.numpy import save

from fedjax_dp.core import checks, files

# Below the state folder of a node.
FOLDER = "project"
_CURRENT, _LOCK, _SCORES, _SENT = "current.json", ".lock", "scores.jsonl", "scores.sent"
_MODEL, _TOKEN = "model.safetensors", "token"
# Seconds between two reads of the folder.
EVERY = 0.1
# What one report of scores may hold.
_MOST_SCORES, _LONGEST_NAME = 100, 100
# The bytes of reports in one reply, below what a server takes.
_MOST_SENT = 2**19
# Types by their names in safetensors files.
_TYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(jnp.bfloat16),
    "BOOL": np.dtype(bool),
    **{f"F{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    **{f"I{8 * size}": np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"u{size}") for size in (1, 2, 4, 8)},
}
# What a server collects, and what a node sends.
Scores = Literal["none", "exact"]
_MOST_BYTES = 2**20


class NotOpenError(ValueError):
    """An update for a round that accepts none: it is over, or already has one of that data link."""


class Task(NamedTuple):
    """The newest round of a node."""

    experiment: str  # The digest of the plan, which server and nodes agree on.
    round: int  # Rounds done before it.
    rounds: int | None  # The rounds of the experiment; None if unknown.
    datalinks: Sequence[int]  # The clients of this node that were drawn, by their indices.
    deadline: float  # When the node stops waiting for updates, in seconds since 1970.
    is_open: bool  # Whether the node waits for updates; false once it has replied.


class Exchange:
    """The folder in which a node and a script meet."""

    def __init__(self, folder: str | pathlib.Path) -> None:
        """Opens the folder; made, for its owner alone, where it is missing."""
        self._folder = pathlib.Path(folder)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def task(self) -> Task | None:
        """Reads the newest round; None before the first."""
        path = self._folder / _CURRENT
        if not path.exists():
            return None
        return Task(**files.parse_json(files.read_text(path), path))

    def open(self, task: Task, model: Mapping[str, np.ndarray]) -> None:
        """Opens a round; one that is repeated loses the updates of its earlier attempt."""
        with self._locked():
            place = self._place(task, task.round)
            # Later rounds were of an attempt that the server has gone back behind. They are set
            # aside, since no message may delete what a participant was sent.
            for old in sorted(place.parent.glob("round-*")):
                if old.name > place.name:
                    aside = old.with_name(f"replaced-{old.name}")
                    shutil.rmtree(aside, ignore_errors=True)
                    os.replace(old, aside)
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(mode=0o700, parents=True)
            files.write_private(place / _MODEL, encoded(model))
            self._write_task(task)

    def close(self, task: Task) -> dict[int, bytes]:
        """Closes a round; returns the updates that arrived, by data link."""
        with self._locked():
            self._write_task(task._replace(is_open=False))
            updates = {link: self._update(task, link) for link in task.datalinks}
            return {link: path.read_bytes() for link, path in updates.items() if path.exists()}

    def missing(self, task: Task) -> list[int]:
        """Lists the data links whose updates have not arrived."""
        return [link for link in task.datalinks if not self._update(task, link).exists()]

    def awaited(self) -> list[int]:
        """Lists the data links whose updates the newest round waits for; none once it is over."""
        task = self.task()
        return self.missing(task) if task is not None and is_open(task) else []

    def model(self, round: int | None = None) -> bytes:
        """Reads the model of a round, the newest by default, as safetensors."""
        task = self._task_of(round)
        number = task.round if round is None else round
        path = self._place(task, number) / _MODEL
        if not path.exists():
            raise FileNotFoundError(f"this node has received no model in round {number}")
        return path.read_bytes()

    def put(self, content: bytes, datalink: int | None, round: int) -> int:
        """Checks an update against the model of its round and stores it, once."""
        task = self._task_of(round)
        link = _datalink(task, datalink)
        _require_open(task, round)
        require_fit(decoded(content), decoded(self.model()))
        with self._locked():
            task = self._task_of(round)
            _require_open(task, round)
            _datalink(task, link)
            path = self._update(task, link)
            if path.exists():
                rule = f"get one update of data link {link}"
                raise NotOpenError(f"round {round} must {rule}, got a second one")
            files.write_private(path, content)
        return link

    def report(
        self, scores: Mapping[str, float], round: int | None, datalink: int | None
    ) -> dict[str, Any]:
        """Stores scores of a round that this node has received."""
        if round is not None:
            checks.whole("round", round, at_least=0)
        task = self._task_of(round)
        number = task.round if round is None else round
        is_received = (self._place(task, number) / _MODEL).exists()
        checks.require(is_received, "round", "be one that this node has received", number)
        require_scores({"round": number, "datalink": datalink, "scores": scores})
        plain = {name: float(value) for name, value in scores.items()}
        line = {"round": number, "datalink": datalink, "scores": plain}
        with self._locked():
            text = json.dumps({"experiment": task.experiment, **line})
            files.append_line(self._folder / _SCORES, text)
        return line

    def scores(self) -> list[dict[str, Any]]:
        """Reads all scores that were reported, in order, without lines that a crash has cut off."""
        path, found = self._folder / _SCORES, list[dict[str, Any]]()
        if not path.exists():
            return []
        for _, line in files.lines(path.read_text(encoding="utf-8", errors="replace")):
            with contextlib.suppress(ValueError):
                found.append(files.parse_json(line, path))
        return found

    def unsent_scores(
        self, experiment: str, start: int | None = None
    ) -> tuple[list[dict[str, Any]], int]:
        """Takes the scores after `start` that no reply has carried; returns the end of them too."""
        names = ("round", "datalink", "scores")
        with self._locked():
            sent, found = self._folder / _SENT, self.scores()
            end = int(sent.read_text()) if sent.exists() else 0
            end = end if start is None else min(start, end)
            taken, size = list[dict[str, Any]](), 0
            for report in found[end:]:
                size += len(json.dumps(report))
                if size > _MOST_SENT:
                    break
                end += 1
                if report["experiment"] == experiment:
                    taken.append({name: report[name] for name in names})
            files.write_private(sent, str(end).encode())
        return taken, end

    def token(self, token: str) -> pathlib.Path:
        """Writes the token of a gateway to a file for its owner alone; returns its path."""
        path = self._folder / _TOKEN
        files.write_private(path, token.encode())
        return path

    def _locked(self) -> contextlib.AbstractContextManager[Any]:
        return FileLock(self._folder / _LOCK)

    def _place(self, task: Task, round: int) -> pathlib.Path:
        return self._folder / task.experiment[:16] / f"round-{round:08d}"

    def _update(self, task: Task, link: int) -> pathlib.Path:
        return self._place(task, task.round) / f"update-{link}.safetensors"

    def _write_task(self, task: Task) -> None:
        files.write_private(self._folder / _CURRENT, json.dumps(task._asdict()).encode())

    def _task_of(self, round: int | None) -> Task:
        task = self.task()
        if task is None or (round is not None and round > task.round):
            what = "no round" if round is None else f"no round {round}"
            raise NotOpenError(f"this node has received {what} yet")
        return task


def exchange_of(state_dir: str | pathlib.Path) -> Exchange:
    """Opens the folder of a node, for its script; refuses a state folder that does not exist."""
    rule = (
        "be a folder, the state-dir of a node with training = 'script', which makes it when the "
        "first message of a run arrives"
    )
    is_folder = files.kind_of(pathlib.Path(state_dir), "state-dir") == "folder"
    checks.require(is_folder, "state-dir", rule, str(state_dir))
    return Exchange(pathlib.Path(state_dir) / FOLDER)


def encoded(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Writes arrays as safetensors."""
    for name, array in arrays.items():
        rule = f"be an array of one of {', '.join(sorted(_TYPES))}"
        checks.require(array.dtype in _TYPES.values(), f"array {name!r}", rule, array.dtype)
    return save({name: np.asarray(array, order="C") for name, array in arrays.items()})


def decoded(content: bytes) -> dict[str, np.ndarray]:
    """Reads safetensors; a file that is cut off or damaged is a ValueError."""
    with files.reading("an update", "be a whole safetensors file", safetensors.SafetensorError):
        leaves = safetensors.deserialize(content)
    arrays = {}
    for name, spec in leaves:
        kind = spec["dtype"]
        checks.one_of(f"the type of array {name!r}", kind, _TYPES)
        arrays[name] = np.frombuffer(spec["data"], _TYPES[kind]).reshape(spec["shape"])
    return arrays


def require_fit(arrays: Mapping[str, np.ndarray], model: Mapping[str, np.ndarray]) -> None:
    """Requires the names, shapes and types of a model, and finite values."""
    unknown, missing = sorted({*arrays} - {*model}), sorted({*model} - {*arrays})
    checks.require(not unknown, "an update", f"hold the arrays {sorted(model)}", unknown)
    checks.require(not missing, "an update", f"hold the arrays {sorted(model)}", f"no {missing}")
    for name, like in model.items():
        array, rule = arrays[name], f"be {like.dtype}{list(like.shape)} as in the model"
        fits = array.shape == like.shape and array.dtype == like.dtype
        found = f"{array.dtype}{list(array.shape)}"
        checks.require(fits, f"array {name!r}", rule, found)
        is_float = jnp.issubdtype(like.dtype, jnp.inexact)
        is_finite = not is_float or bool(np.all(np.isfinite(array)))
        checks.require(is_finite, f"array {name!r}", "be finite", "NaN or infinity")


def require_scores(line: Any) -> None:
    """Requires what `Exchange.report` writes, wherever it comes from."""
    rule = "hold round, datalink and scores"
    is_whole = isinstance(line, Mapping) and set(line) == {"round", "datalink", "scores"}
    checks.require(is_whole, "a report", rule, line)
    checks.whole("round", line["round"], at_least=0)
    if line["datalink"] is not None:
        checks.whole("datalink", line["datalink"], at_least=0)
    scores = line["scores"]
    fits = isinstance(scores, Mapping) and 0 < len(scores) <= _MOST_SCORES
    checks.require(fits, "scores", f"be 1 to {_MOST_SCORES} numbers by name", scores)
    for name, value in scores.items():
        is_name = isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME and name.isprintable()
        rule = f"have a name of 1 to {_LONGEST_NAME} printable letters"
        checks.require(is_name, "a score", rule, name)
        is_number = not isinstance(value, bool) and checks.is_finite_number(value)
        checks.require(is_number, f"score {name!r}", "be a finite number", value)


def is_open(task: Task) -> bool:
    """Whether a round takes updates."""
    return task.is_open and time.time() < task.deadline


def _require_open(task: Task, round: int) -> None:
    if round < task.round or not is_open(task):
        raise NotOpenError(
            f"round {round} must be open to take an update, got one for a round that is over"
        )


def _datalink(task: Task, datalink: int | None) -> int:
    """Finds the data link of an update."""
    links = list(task.datalinks)
    if datalink is None:
        checks.require(len(links) == 1, "datalink", f"be given, one of {links}", None)
        return links[0]
    checks.require(datalink in links, "datalink", f"be one of those drawn, {links}", datalink)
    return datalink


def until(condition: Callable[[], bool], deadline: float) -> None:
    """Waits until a condition holds or a time, in seconds since 1970, has come."""
    while not condition() and time.time() < deadline:
        time.sleep(EVERY)


class ScoresFile:
    """A file of reports, one per line: round, clients and scores."""

    def __init__(self, path: str | pathlib.Path) -> None:
        """Opens the file; a new one is readable by its owner alone."""
        self._path = pathlib.Path(path)
        self._path.touch(mode=0o600)

    def append(self, clients: Sequence[int], text: str) -> None:
        """Appends the reports in a reply; those that do not fit are left out, with a warning."""
        lost = f"scores of clients {list(clients)} are lost"
        try:
            checks.require(len(text) <= _MOST_BYTES, "scores", "have at most 1 MiB", len(text))
            reports = files.parse_json(text, "scores")
            checks.require(isinstance(reports, list), "scores", "be a list of reports", reports)
        except ValueError as error:
            warnings.warn(f"{lost}: {error}", stacklevel=2)
            return
        for line in reports:
            try:
                report = _report(line, clients)
            except ValueError as error:
                warnings.warn(f"{lost}: {error}", stacklevel=2)
                continue
            files.append_line(self._path, json.dumps(report))


def _report(line: Any, clients: Sequence[int]) -> dict[str, Any]:
    """Reads a report of a node."""
    require_scores(line)
    link = line["datalink"]
    rule = f"be None or one of {list(clients)}"
    checks.require(link is None or link in clients, "datalink", rule, link)
    of = list(clients) if link is None else [link]
    return {"round": line["round"], "clients": of, "scores": line["scores"]}


class Project:
    """An experiment as a participant's own training script sees it.

    A participant may hold several clients, its data links. In each round some of them are drawn:
    the script pulls the model, trains it on the data of each, and pushes the trained parameters.
    The node computes the update, clips it and adds noise as the algorithm says, so that the privacy
    of clients does not depend on the script.
    """

    def __init__(self, exchange: Exchange) -> None:
        """Wraps the folder."""
        self._exchange = exchange
        self._pulled: int | None = None

    @property
    def current_round(self) -> int | None:
        """The newest round that this node takes part in, from 0; None before the first."""
        task = self._exchange.task()
        return None if task is None else task.round

    @property
    def rounds(self) -> int | None:
        """The number of rounds of the experiment; None before the first."""
        task = self._exchange.task()
        return None if task is None else task.rounds

    @property
    def datalinks(self) -> list[int]:
        """The data links whose updates the current round waits for."""
        return self._exchange.awaited()

    @property
    def deadline(self) -> float | None:
        """The end of the current round, in seconds since 1970; None before the first."""
        task = self._exchange.task()
        return None if task is None else task.deadline

    def wait(self, timeout: float = math.inf) -> int | None:
        """Waits until a round needs updates.

        Args:
          timeout: seconds, at least 0.

        Returns:
          The round; None after the timeout, or after the last round of the experiment.
        """
        checks.require(timeout >= 0, "timeout", "be at least 0", timeout)
        end = time.monotonic() + timeout
        while True:
            task = self._exchange.task()
            if task is not None:
                if is_open(task) and self._exchange.missing(task):
                    return task.round
                # Of an experiment that this script took part in, not of one before.
                if self._pulled == task.round and task.round + 1 == task.rounds:
                    return None
            if time.monotonic() >= end:
                return None
            time.sleep(EVERY)

    def pull(
        self, round: int | None = None, file: str | pathlib.Path | None = None
    ) -> dict[str, np.ndarray]:
        """Reads the model that a round starts from.

        Args:
          round: a round that this node has received; None for the newest.
          file: a safetensors file to write too; None for none.

        Returns:
          The parameters by path, such as "params/Dense_0/kernel".

        Raises:
          ValueError: before the first round.
          FileNotFoundError: for a round that this node has not received.
        """
        content = self._exchange.model(round)
        self._pulled = self.current_round if round is None else round
        if file is not None:
            files.write_private(file, content)
        return decoded(content)

    def push(
        self,
        update: Mapping[str, Any] | str | pathlib.Path,
        datalink: int | None = None,
        round: int | None = None,
    ) -> None:
        """Sends the trained parameters of a data link, once in each round.

        Args:
          update: all parameters by the names that `pull` has, of the same shapes and types; arrays
            of any library that NumPy reads, or a safetensors file.
          datalink: the client that they were trained for; None if one alone was drawn.
          round: the round; None for that of the last `pull`.

        Raises:
          NotOpenError: if the round is over or not begun, or has an update of the data link.
          ValueError: for parameters that are damaged, not finite, or do not fit the model.
        """
        if isinstance(update, Mapping):
            content = encoded({name: np.asarray(value) for name, value in update.items()})
        else:
            files.require_file(update, "update")
            content = pathlib.Path(update).read_bytes()
        number = self._pulled if round is None else round
        rule = "be given, or follow a pull, whose round it then is"
        checks.require(number is not None, "round", rule, None)
        assert number is not None
        self._exchange.put(content, datalink, number)

    def report(
        self, scores: Mapping[str, float], round: int | None = None, datalink: int | None = None
    ) -> None:
        """Stores scores of a round on this node; the server stores them too if it collects scores.

        They travel with the next reply of the node: before `push` with that of the round. After the
        last round the server asks for the rest. Scores are exact: no noise protects them.

        Args:
          scores: finite numbers by name, at most 100.
          round: a round that this node has received; None for the newest.
          datalink: the client that they are of; None for the participant.

        Raises:
          ValueError: for other scores, or an unknown round.
        """
        self._exchange.report(scores, round, datalink)

    def scores(self) -> list[dict[str, Any]]:
        """Reads the scores that were reported on this node, in order, with their rounds."""
        return self._exchange.scores()


def project(where: Context | str | pathlib.Path) -> Project:
    """Opens the project of a node, for a training script on the same machine.

    The node is configured with `training="script"`, and its `state-dir` is given here.

    Args:
      where: the node's state folder, or a Flower context of the node.

    Returns:
      The project.

    Raises:
      ValueError: for a node without a state folder, or one that does not exist: the node makes it
        when the first message of a run arrives, or you do before.
    """
    if isinstance(where, Context):
        rule = "hold state-dir for a training script"
        checks.require("state-dir" in where.node_config, "node-config", rule, where.node_config)
        where = str(where.node_config["state-dir"])
    return Project(exchange_of(where))
