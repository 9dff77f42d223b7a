"""Options in named tuples: configurations name them as if they were parameters."""

import inspect
from typing import NamedTuple

import pytest

from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Positive
from fedjax_dp.core.registry import grouped, options_of
from fedjax_dp.experiment.schema.options import fields_of


class Steps(NamedTuple):
    """How steps are taken.

    Attributes:
      size: the length of a step,
        above 0.
      count: the number of steps.
    """

    size: Positive = 0.5
    count: Count = 2


@checked
def part(model: str, *, first: Count, steps: Steps = Steps(count=3), last: bool = False):
    """Makes a part.

    Args:
      model: given.
      first: the first option.
      steps: how steps are taken.
      last: the last option.

    Returns:
      What it was given.
    """
    return first, steps, last


def test_fields_are_options_in_the_place_of_their_value():
    """With the defaults of the factory, which may differ from those of the class."""
    empty = inspect.Parameter.empty
    found = options_of(part, ("model",))
    assert list(found.items()) == [("first", empty), ("size", 0.5), ("count", 3), ("last", False)]
    assert list(options_of(part, ("model", "size"))) == ["first", "count", "last"]


def test_kinds_and_descriptions_are_those_of_the_class():
    fields = fields_of("part", part, given=("model",))
    assert fields["size"].description == "the length of a step, above 0."
    assert fields["count"].default == 3 and fields["last"].description == "the last option."


def test_options_go_into_their_value():
    options = {"first": 1, "size": 2.0}
    assert part("m", **grouped(part, options)) == (1, Steps(2.0, 3), False)
    assert options == {"first": 1, "size": 2.0}


def test_fields_are_checked_by_their_own_names():
    with pytest.raises(ValueError, match=r"^size must be above 0, got -1"):
        part("m", first=1, steps=Steps(size=-1))
    with pytest.raises(ValueError, match="steps must be a Steps, got 1"):
        part("m", first=1, steps=1)
