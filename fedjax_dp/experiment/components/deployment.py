"""Rounds of an experiment that run on other machines than this one."""

import pathlib
from collections.abc import Sequence
from typing import Protocol

from fedjax_dp.engine.record import RoundRecord
from fedjax_dp.experiment.components.experiment import Experiment


class Deployment(Protocol):
    """Where the rounds of an experiment run."""

    def deploy(self, experiment: Experiment) -> Experiment:
        """Returns the experiment with another simulation, whose rounds run there."""

    def open(self, folder: pathlib.Path) -> Sequence[RoundRecord]:
        """Opens a run folder; returns the records of all rounds that it has sent, in order.

        They are charged when a run resumes, also those whose outcome was lost.
        """
