"""Subjects: functions of others with what they claim, and how the checks call them."""

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np

from fedjax_dp.audit.conformance.claims import (
    AdaptiveRelease,
    Masked,
    MaskLaw,
    Release,
    SamplingLaw,
    Training,
)
from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import check_fields, checked
from fedjax_dp.core.ranges import Pattern
from fedjax_dp.core.registry import module_of_file

Array: TypeAlias = np.ndarray
Name: TypeAlias = Annotated[str, Pattern(r"(?s).*\S.*", "a name")]


class Misbehaviour(Exception):
    """A subject that raised an exception, or returned what is not of the agreed form."""


class NotStarted(ValueError):
    """A process of a subject that cannot be started, which is no finding about the subject."""


@dataclasses.dataclass(frozen=True)
class _Subject:
    name: Name

    def __post_init__(self) -> None:
        """Checks every field."""
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class Aggregation(_Subject):
    """Turns the updates of a cohort into an aggregate.

    Attributes:
      name: of the subject in a report.
      aggregate: `(updates [clients, entries] float32, seed) -> [entries]`; the same seed draws the
        same noise, if it can.
      claim: what is claimed of it.
    """

    aggregate: Callable[[Array, int], Any]
    claim: Release


@dataclasses.dataclass(frozen=True)
class WeightedAggregation(_Subject):
    """Turns the updates of a cohort and their weights into an aggregate.

    Attributes:
      name: of the subject in a report.
      aggregate: `(updates [clients, entries] float32, weights [clients] float32, seed) ->
        [entries]`.
      claim: what is claimed of it, whatever the weights.
    """

    aggregate: Callable[[Array, Array, int], Any]
    claim: Release


@dataclasses.dataclass(frozen=True)
class AdaptiveAggregation(_Subject):
    """Aggregates round after round, each with a clip norm that depends on the rounds before.

    Attributes:
      name: of the subject in a report.
      aggregate: `(updates [rounds, clients, entries] float32, seed) -> (aggregates [rounds,
        entries], clip_norms [rounds])`, from the start; the clip norm of a round is the one that
        it clipped to.
      claim: what is claimed of it.
    """

    aggregate: Callable[[Array, int], Any]
    claim: AdaptiveRelease


@dataclasses.dataclass(frozen=True)
class Step(_Subject):
    """Turns the records of a batch into a private gradient.

    The loss of a record x is the inner product of parameters and x, so that its gradient is x.

    Attributes:
      name: of the subject in a report.
      step: `(records [records, entries] float32, seed) -> [entries]`.
      claim: what is claimed of it.
    """

    step: Callable[[Array, int], Any]
    claim: Release


@dataclasses.dataclass(frozen=True)
class Run(_Subject):
    """Runs a whole training: draws units and releases something in every round.

    Attributes:
      name: of the subject in a report.
      run: `(contributions [units, entries] float32, seed) -> [rounds, entries]`, all that is
        released; every unit contributes its row in each round in which it is drawn.
      claim: what is claimed of it.
    """

    run: Callable[[Array, int], Any]
    claim: Training


@dataclasses.dataclass(frozen=True)
class Sampling(_Subject):
    """Draws the units of each round.

    Attributes:
      name: of the subject in a report.
      draw: `(rounds, seed) -> [rounds]` arrays of the indices that were drawn.
      claim: the law that is accounted for.
    """

    draw: Callable[[int, int], Any]
    claim: SamplingLaw


@dataclasses.dataclass(frozen=True)
class Accounting(_Subject):
    """Computes the ε of a training.

    Attributes:
      name: of the subject in a report.
      epsilon: `(rounds, dp_delta) -> ε`, as the subject states it.
      claim: the training that it is stated for.
    """

    epsilon: Callable[[int, float], Any]
    claim: Training


@dataclasses.dataclass(frozen=True)
class Masking(_Subject):
    """Masks the values of clients, and recovers their sum.

    Attributes:
      name: of the subject in a report.
      mask: `(values [clients, entries] int64, is_dropped [clients] bool, seed) -> (messages
        [clients, entries], sum [entries])`, integers from 0 to m − 1: what clients send, and what
        the server recovers of those that did not drop out.
      claim: modulus, clients and entries.
    """

    mask: Callable[[Array, Array, int], Any]
    claim: Masked


@dataclasses.dataclass(frozen=True)
class MaskSource(_Subject):
    """Draws masks, such as those of the pairs of a cohort whose keys are new.

    Attributes:
      name: of the subject in a report.
      draw: `(count, seed) -> [count, entries]`, integers from 0 to m − 1.
      claim: modulus, count and entries.
    """

    draw: Callable[[int, int], Any]
    claim: MaskLaw


Releasing: TypeAlias = Aggregation | WeightedAggregation | AdaptiveAggregation | Step
Subject: TypeAlias = Releasing | Run | Sampling | Accounting | Masking | MaskSource
SUBJECTS: tuple[type, ...] = (
    *(Aggregation, WeightedAggregation, AdaptiveAggregation, Step),
    *(Run, Sampling, Accounting, Masking, MaskSource),
)


class View(NamedTuple):
    """What the four releasing kinds share: one release of rows, with weights where it has them."""

    release: Callable[[Array, Array, int], Any]
    claim: Release
    has_weights: bool

    def __call__(self, rows: Array, seed: int, weights: Array | None = None) -> Array:
        """Releases rows of weight 1, or of the weights given; returns `[entries]`, float64."""
        weights = np.ones(len(rows), np.float32) if weights is None else weights
        return numbers((self.claim.size,), self.release, rows, weights, seed)


def view_of(subject: Releasing) -> View:
    """Views a subject as a function of rows, weights and a seed; an adaptive one in round 1."""
    match subject:
        case WeightedAggregation():
            return View(subject.aggregate, subject.claim, True)
        case AdaptiveAggregation():
            run, first = subject.aggregate, subject.claim.first
            return View(lambda rows, weights, seed: run(rows[None], seed)[0][0], first, False)
    release = subject.step if isinstance(subject, Step) else subject.aggregate
    return View(lambda rows, weights, seed: release(rows, seed), subject.claim, False)


def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of a subject on copies of the arguments; its exceptions are misbehaviour."""
    copies = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
    try:
        return function(*copies)
    except (Misbehaviour, NotStarted, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise Misbehaviour(f"raises {said(error)}") from error


def said(error: BaseException) -> str:
    """The type and the text of an exception, in one line."""
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def numbers(shape: Sequence[int], function: Callable[..., Any], *arguments: Any) -> Array:
    """Calls a function that should return numbers of a shape; returns them in float64."""
    return as_numbers(called(function, *arguments), shape)


def array_of(value: Any) -> Array:
    """Reads what a subject returned as an array."""
    try:
        return np.asarray(value)
    except ValueError:
        raise Misbehaviour(f"returns {type(value).__name__}, not an array of numbers") from None
    except Exception as error:
        # Of an array of another package, such as one that needs gradients.
        what = f"returns {type(value).__name__}, not an array of numbers"
        raise Misbehaviour(f"{what}: {said(error)}") from error


def as_numbers(value: Any, shape: Sequence[int] | None = None) -> Array:
    """Reads what a subject returned as numbers, of a shape or of any, in float64."""
    given = array_of(value)
    # NumPy reads texts, and leaves the imaginary part out.
    if given.dtype.kind in "cmMSU":
        raise Misbehaviour(f"returns an array of {given.dtype}, not of real numbers")
    if given.dtype.kind == "O":
        raise Misbehaviour(f"returns {type(value).__name__}, not an array of numbers")
    array = given.astype(np.float64)
    if shape is not None and array.shape != tuple(shape):
        raise Misbehaviour(f"returns an array of shape {array.shape}, not {tuple(shape)}")
    return array


@checked
def subjects_of(file: str) -> list[Subject]:
    """Reads the subjects that a Python file defines.

    Args:
      file: its path, ending in ".py"; it is run, and may import modules of its folder.

    Returns:
      The values of its top level that are subjects, in order.

    Raises:
      ValueError: if the file cannot be run or defines none.
    """
    checks.require(file.endswith(".py"), "SUBJECT.py", "end in .py", file)
    # First, as of a script that is run.
    sys.path.insert(0, str(pathlib.Path(file).expanduser().resolve().parent))
    module = module_of_file(pathlib.Path(file), file)
    # A subject may have two names.
    named = {id(v): v for v in vars(module).values() if isinstance(v, SUBJECTS)}
    found: list[Any] = list(named.values())
    kinds = ", ".join(kind.__name__ for kind in SUBJECTS)
    checks.require(len(found) > 0, "SUBJECT.py", f"define a value of {kinds}", file)
    return found
