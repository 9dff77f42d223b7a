"""Participation by your own training script, which has the loop."""

import math
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Context

from fedjax_dp.core import checks, files
from fedjax_dp.flower.exchange import EVERY, Exchange, decoded, encoded, exchange_of, is_open


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
