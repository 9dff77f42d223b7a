"""The contract of callbacks: what they receive after each evaluation, and what they decide."""

import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_dp.engine.round import SimulationState
from fedjax_dp.experiment.components.experiment import Experiment


class Progress(NamedTuple):
    """The input of a callback after an evaluation; the last of `rows` holds its metrics.

    `warn` reports a warning, which the summary of the run has too.
    """

    rows: Sequence[Mapping[str, Any]]
    state: SimulationState
    experiment: Experiment
    folder: pathlib.Path
    warn: Callable[[str], None] = warnings.warn


class Callback(NamedTuple):
    """A function that is called after each evaluation.

    A resumed run calls it again for the rounds that are run again, so its decision should depend on
    `Progress.rows` alone.

    Attributes:
      call: `(progress) -> bool | None`; true stops the run.
      is_private: whether its decision depends on released models and public facts alone. If so, and
        it stops a run, ε is that of all planned rounds, any of which could have been the last; if
        not, the statement declares that ε does not cover when the run ended.
    """

    call: Callable[[Progress], bool | None]
    is_private: bool = False
