"""Bad inputs to every public function: each is refused by name, and nothing else comes up."""

import collections
import dataclasses
import inspect
import math
import pathlib
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax
import numpy as np
import numpy.typing
import pytest
from annotated_types import Ge, Gt, Le, Lt
from function_cases import CASES, HOLD, joining, mean, model, public, rng, store, trainer
from marks import slow, telling

SEED = 20_261
# Counts that are mistakes. How long a run may be is bounded by `core.ranges`.
HUGE = (2**40, 1e30)
UNKNOWN = "an unknown keyword"
# What is called at all: for some functions a valid call would look for files.
CALLED = [name for name, case in CASES.items() if case.good is not None]
BOUNDED_ELSEWHERE = {"num_steps", "num_epochs", "num_rounds", "server_epochs"}


class Limits(NamedTuple):
    """What annotation or docstring say of a number."""

    low: float = -math.inf
    high: float = math.inf
    is_low_in: bool = True
    is_high_in: bool = True
    may_be_infinite: bool = False

    def hold(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if math.isinf(value):
            return self.may_be_infinite and value > 0
        above = value >= self.low if self.is_low_in else value > self.low
        return above and (value <= self.high if self.is_high_in else value < self.high)


def limits_of(marks: Sequence[Any], words: str) -> Limits:
    """The range that an annotation has, or that the line of a docstring begins with."""
    found = Limits(may_be_infinite=bool(re.search(r"\binf(inite|inity)?\b", words)))
    for mark in marks:
        match mark:
            case Gt():
                found = found._replace(low=mark.gt, is_low_in=False)
            case Ge():
                found = found._replace(low=mark.ge)
            case Lt():
                found = found._replace(high=mark.lt, is_high_in=False)
            case Le():
                found = found._replace(high=mark.le)
    if marks:
        return found
    number = r"(-?\d+(?:\.\d+)?)(?:/(\d+))?"
    said = re.search(rf"\bin ([\[(]){number}, {number}([\])])", words)
    if said:
        left, a, b, c, d, right = said.groups()
        low, high = float(a) / float(b or 1), float(c) / float(d or 1)
        return found._replace(low=low, high=high, is_low_in=left == "[", is_high_in=right == "]")
    if said := re.search(rf"\babove {number}(?:\^(-?\d+))?", words):
        found = found._replace(low=float(said[1]) ** int(said[3] or 1), is_low_in=False)
    elif said := re.search(rf"\bat least {number}\b", words):
        found = found._replace(low=float(said[1]))
    return found


def described(of: Any) -> dict[str, str]:
    """The lines of a docstring about arguments, or the attributes of a class, by name."""
    text = inspect.getdoc(of) or ""
    if inspect.isclass(of):
        text += "\n\n" + (inspect.getdoc(of.__init__) or "")
    found: dict[str, str] = {}
    for part in re.findall(r"\n(?:Args|Attributes):\n(.*?)(?:\n\n|\Z)", text, re.S):
        for line in re.sub(r"\n    +", " ", part).splitlines():
            if said := re.match(r"  \*{0,2}(\w+): (.*)", line):
                found[said[1]] = said[2]
    return found


def alternatives(kind: Any) -> list[Any]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [one for k in typing.get_args(kind) for one in alternatives(k)]
    return [kind]


ARRAY_LIKE = [
    # NumPy's has no alternatives since 2.5.
    set(map(str, typing.get_args(k) or [k]))
    for k in (jax.typing.ArrayLike, numpy.typing.ArrayLike)
]
# How bad a value is.
GOOD, PERHAPS, BAD = "good", "perhaps", "bad"


def _of_number(value: Any, limits: Limits, *, is_whole: bool) -> str:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.number):
        is_scalar_array = isinstance(value, np.ndarray | jax.Array) and value.ndim == 0
        return PERHAPS if is_scalar_array else BAD
    if isinstance(value, complex) or (is_whole and not isinstance(value, int | np.integer)):
        return BAD
    if not limits.hold(float(value)):
        return BAD
    return PERHAPS if value in HUGE else GOOD


def _of_entries(value: Any, limits: Limits) -> str:
    """A number, or an array of them, of a shape that nothing says."""
    if isinstance(value, list | np.ndarray | jax.Array):
        try:
            array = np.asarray(value)
        except ValueError:
            return BAD
        if array.dtype.kind not in "biufO" or (array.dtype == object):
            return BAD
        inside = array.dtype == bool or all(limits.hold(float(x)) for x in array.ravel())
        return PERHAPS if inside else BAD
    return _of_number(value, limits, is_whole=False)


def how_bad(value: Any, kind: Any, words: str) -> str:
    """Classifies a value by what annotation and docstring say of an argument."""
    ones = alternatives(kind)
    rest = [one for one in ones if str(one) not in ARRAY_LIKE[0] | ARRAY_LIKE[1]]
    is_array_like = any(names <= set(map(str, ones)) for names in ARRAY_LIKE)
    found = [_classified(value, one, words) for one in (rest if is_array_like else ones)]
    if is_array_like:
        found.append(_of_entries(value, limits_of((), words)))
    return GOOD if GOOD in found else PERHAPS if PERHAPS in found else BAD


def _classified(value: Any, kind: Any, words: str) -> str:
    marks: Sequence[Any] = ()
    if typing.get_origin(kind) is Annotated:
        kind, *marks = typing.get_args(kind)
        if len(alternatives(kind)) > 1:
            return _of_entries(value, limits_of(marks, words))
    origin = typing.get_origin(kind) or kind
    limits = limits_of(marks, words)
    if kind is Any or isinstance(kind, typing.TypeVar):
        # Numbers that are declared with a range in words alone, such as those of a `LocalConfig`.
        if limits[:2] == Limits()[:2] or value is None:
            return PERHAPS
        return _of_entries(value, limits)
    if kind in (None, type(None)):
        return GOOD if value is None else BAD
    if kind is bool:
        return GOOD if isinstance(value, bool) else BAD
    if kind is int or kind is float:
        return _of_number(value, limits, is_whole=kind is int)
    if origin is Literal:
        return GOOD if isinstance(value, str) and value in typing.get_args(kind) else BAD
    if kind is str:
        names = re.findall(r'"([\w-]+)"', words) if "label" not in words else []
        is_known = isinstance(value, str) and (not names or value in names)
        return GOOD if is_known else BAD
    if kind in (np.ndarray, jax.Array):
        if isinstance(value, list):
            return PERHAPS
        return PERHAPS if isinstance(value, np.ndarray | jax.Array) else BAD
    if origin in (Callable, collections.abc.Callable):
        return GOOD if callable(value) else BAD
    if origin in (Mapping, dict):
        return PERHAPS if isinstance(value, Mapping) else BAD
    if origin in (Sequence, list, tuple, collections.abc.Iterable):
        is_sequence = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)
        if not is_sequence or (origin is tuple and not isinstance(value, tuple)):
            return BAD
        entries = typing.get_args(kind)
        found = [how_bad(x, entries[0], words) for x in value] if entries else []
        return BAD if BAD in found else PERHAPS
    if kind is pathlib.Path or not inspect.isclass(origin) or getattr(kind, "_is_protocol", False):
        return PERHAPS
    return GOOD if isinstance(value, origin) else BAD


def bad_values(random: np.random.Generator) -> dict[str, Any]:
    """What a user might pass by mistake, with a few numbers drawn anew for each argument."""
    return {
        "nan": math.nan,
        "infinity": math.inf,
        "minus infinity": -math.inf,
        "nothing": None,
        "zero": 0,
        "minus one": -1,
        "a half": 0.5,
        "a negative number": -float(random.uniform(0.01, 1e3)),
        "a large fraction": float(random.uniform(1.01, 99.9)),
        "a negative count": -int(random.integers(2, 10**6)),
        "a huge count": HUGE[0],
        "a huge number": HUGE[1],
        "true": True,
        "a complex number": complex(1, random.uniform(1, 2)),
        "a text": "no such name",
        "an empty text": "",
        "bytes": b"1",
        "an empty list": [],
        "a list of texts": ["a", "b"],
        "a list of nothing": [None],
        "a list of lists": [[1], [1, 2]],
        "a mapping": {},
        "an object": object(),
        "a type": int,
        "an array of another shape": np.full((2, 3, 4), 0.5),
        "an array with nan": np.array([0.5, math.nan]),
        "an array of texts": np.array(["a", "b"]),
        "a complex array": np.full(3, 1 + 2j),
        "a negative array": np.full(3, -float(random.uniform(0.5, 9))),
        "a model": model(),
        "a trainer": trainer(),
        "an aggregator": mean(),
        "a population": store(),
        "a participation": joining(),
        "a sampler": joining().sampler,
        "a generator": rng(),
    }


class Input(NamedTuple):
    """One call of which one argument is or may be wrong."""

    name: str
    argument: str
    what: str
    value: Any
    verdict: str


def inputs_of(name: str) -> list[Input]:
    """Everything that is tried on a case, drawn by its name."""
    case = CASES[name]
    of = case.of
    random = np.random.default_rng([SEED, *name.encode()])
    parameters = inspect.signature(of).parameters.values()
    is_plain_class = inspect.isclass(of) and "__init__" in vars(of)
    declared = of.__init__ if is_plain_class and not dataclasses.is_dataclass(of) else of
    hints = typing.get_type_hints(declared, include_extras=True)
    about = described(of)
    found = [Input(name, "no_such_argument", UNKNOWN, 1, BAD)]
    for p in parameters:
        if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) or p.name in case.alone:
            continue
        words, kind = about.get(p.name, ""), hints.get(p.name, Any)
        if p.default is None:
            kind = kind | None if kind is not Any else Any
        for what, value in bad_values(random).items():
            is_huge = isinstance(value, int | float) and value in HUGE
            if is_huge and p.name in BOUNDED_ELSEWHERE:
                continue  # counts are bounded elsewhere
            if kind is Any and how_bad(object(), kind, words) != BAD:
                continue  # a tree of anything
            verdict = how_bad(value, kind, words)
            if verdict != GOOD:
                found.append(Input(name, p.name, what, value, verdict))
    return found


# Nothing says which shape or entries such a value must have; the computation refuses it.
BY_CONTENT = "refused for its shape or entries"
REFUSED, VALID = "refused by name", "valid"
FINE = {REFUSED, BY_CONTENT, VALID}


def outcome_of(tried: Input) -> str:
    """What comes of an input: refused by name, let in, or a failure."""
    case = CASES[tried.name]
    try:
        (case.call or case.of)(**{**case.good(), tried.argument: tried.value})
    except (ValueError, TypeError) as error:
        said = str(error)
        if tried.what == UNKNOWN:
            return REFUSED if tried.argument in said else f"not named: {error!r}"
        is_explained = tried.argument in said and " must " in said and "got " in said
        if is_explained and isinstance(error, ValueError):
            return REFUSED
        return BY_CONTENT if tried.verdict == PERHAPS else f"not in our words: {error!r}"
    except Exception as error:
        return f"another error: {type(error).__name__}: {error}"
    return VALID if tried.verdict == PERHAPS else "let in"


def counted(names: Sequence[str], per_argument: int) -> collections.Counter[str]:
    """Tries some values for every argument of some functions; what is wrong fails."""
    counts: collections.Counter[str] = collections.Counter()
    wrong = []
    for name in names:
        random = np.random.default_rng([SEED, *name.encode()])
        by_argument = collections.defaultdict(list)
        for tried in inputs_of(name):
            by_argument[tried.argument].append(tried)
        for all_of in by_argument.values():
            for index in sorted(random.permutation(len(all_of))[:per_argument]):
                tried = all_of[index]
                outcome = outcome_of(tried)
                counts[outcome.split(":")[0]] += 1
                if outcome not in FINE:
                    wrong.append(f"{name}({tried.argument}={tried.what}): {outcome[:200]}")
    assert not wrong, "\n".join(wrong)
    return counts


@slow
def test_bad_inputs_are_refused_by_name():
    counts = counted(CALLED, per_argument=12)
    print(*(f"{outcome}: {count}" for outcome, count in counts.most_common()), sep="\n")
    assert sum(counts.values()) >= 400 and counts[REFUSED] >= 0.9 * sum(counts.values())


@telling
def test_one_bad_input_for_each_argument():
    """What is refused costs nothing; whose valid call takes long is left to the slow suite."""
    assert counted(CALLED[::4], per_argument=1)[REFUSED] >= 50


def test_every_public_function_has_a_case():
    assert not set(public()) - {case.of.__name__ for case in CASES.values()} - set(CASES)
    assert not HOLD & set(CASES), "what is called holds nothing"


@pytest.mark.parametrize("value", [math.nan, -1, "1", None, True, 2**40])
def test_a_value_outside_its_range_is_bad(value):
    assert how_bad(value, Annotated[int, Ge(1), Lt(2**31)], "a count, at least 1") == BAD


def test_what_is_let_in_is_found(monkeypatch):
    """A function that takes anything is found out."""
    case = CASES["keep_largest"]
    careless = case._replace(call=lambda **given: None)
    monkeypatch.setitem(CASES, "keep_largest", careless)
    with pytest.raises(AssertionError, match=r"keep_largest\(share=.*let in"):
        counted(["keep_largest"], per_argument=4)
