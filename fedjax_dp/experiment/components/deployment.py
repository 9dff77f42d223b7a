"""Rounds of an experiment that run on other machines than this one."""

import pathlib
from collections.abc import Sequence
from typing import Protocol

from fedjax_dp.engine.record import RoundRecord
from fedjax_dp.experiment.components.experiment import Experiment, Population
from fedjax_dp.experiment.schema.config import Config


class Deployment(Protocol):
    """Where the rounds of an experiment run."""

    def population(self, config: Config, folder: pathlib.Path | None) -> Population | None:
        """Returns clients whose data are there; None if the configuration says where data are.

        The folder is that of a run that is resumed, or None.
        """

    def deploy(self, experiment: Experiment) -> Experiment:
        """Returns the experiment with another simulation, whose rounds run there."""

    def open(self, folder: pathlib.Path, rounds: int) -> Sequence[RoundRecord]:
        """Opens a run folder; returns the records of all rounds that it has sent, in order.

        They are charged when a run resumes, also those whose outcome was lost; a ValueError if the
        completed rounds, `rounds` of them, are not among them.
        """
