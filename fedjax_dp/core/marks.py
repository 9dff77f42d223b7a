"""Marks on arrays, and which outputs of a traced function are computed from a marked array."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from fedjax_dp.core import jaxprs

_MARK = "fedjax_dp: marked"


def mark(x: jax.Array) -> jax.Array:
    """Marks an array, so that `marks_reaching` finds what is computed from it."""
    return checkpoint_name(x, _MARK)


class Reached(NamedTuple):
    """Where marks arrive."""

    outputs: list[bool]
    # Primitives through which marks pass in a way that is not known, so that all of their outputs
    # are taken to be marked.
    unknown: list[str]
    # Named arrays, less the prefix of their names.
    names: list[str]
    # Equations that choose among arrays by one that is marked, by their identity.
    choices: frozenset[int] = frozenset()


def marks_reaching(
    closed: jaxprs.ClosedJaxpr,
    inputs: Sequence[bool] | None = None,
    prefix: str = _MARK,
    *,
    ends: str | None = None,
) -> Reached:
    """Finds for each output of a traced function whether a marked array reaches it.

    `inputs` says which of its arguments count as marked, `prefix` which named arrays are listed. An
    array with the name `ends`, such as an aggregate with noise, is not marked, whatever it was
    computed from.
    """
    if not _is_seen():
        return Reached([True] * len(closed.jaxpr.outvars), ["checkpoint_name"], [])
    unknown: dict[str, None] = {}
    names: dict[str, None] = {}
    choices: set[int] = set()
    marked = list(inputs or [False] * len(closed.jaxpr.invars))
    is_any = any(marked) or _has_mark(closed)
    follow = functools.partial(_of_equation, _Seen(unknown, names, choices, prefix, ends, is_any))
    outputs = _through(closed, marked, follow)
    return Reached(outputs, list(unknown), list(names), frozenset(choices))


class _Seen(NamedTuple):
    """What was seen on the way, as keys, and what there is to see."""

    unknown: dict[str, None]
    names: dict[str, None]
    choices: set[int]
    prefix: str
    ends: str | None
    is_any_marked: bool


@functools.cache
def _is_seen() -> bool:
    """Checks that this version of JAX shows a mark in a jaxpr."""
    return _has_mark(jax.make_jaxpr(mark)(np.zeros((), np.float32)))


_Follow = Callable[..., list[bool]]


def _through(closed: jaxprs.ClosedJaxpr, inputs: list[bool], follow: _Follow) -> list[bool]:
    """Follows marks through a jaxpr; its constants have none."""
    return jaxprs.evaluate(
        closed, inputs, follow, literal=lambda v: False, constant=lambda value: False
    )


def _of_equation(seen: _Seen, eqn: jaxprs.JaxprEqn, *inputs: bool) -> list[bool]:
    """Follows marks through an equation; writes down where that is not possible."""
    follow = functools.partial(_of_equation, seen)
    structure = jaxprs.layout(eqn)
    if isinstance(structure, jaxprs.While):
        return _of_while(structure, inputs, follow)
    if isinstance(structure, jaxprs.Scan):
        return _of_scan(structure, inputs, follow)
    if inputs and inputs[0] and eqn.primitive.name in ("cond", "select_n"):
        seen.choices.add(id(eqn))
    if isinstance(structure, jaxprs.Cond):
        branches = [_through(branch, list(inputs[1:]), follow) for branch in structure.branches]
        return [any(sets) or inputs[0] for sets in zip(*branches, strict=True)]
    if structure is not None:
        return _through(structure.body, list(inputs), follow)
    if _is_mark(eqn):
        return [True] * len(eqn.outvars)
    for name in _texts(eqn):
        if name == seen.ends:
            return [False] * len(eqn.outvars)
        if any(inputs) and name.startswith(seen.prefix):
            seen.names[name.removeprefix(seen.prefix)] = None
    inner = jaxprs.inner_jaxprs(eqn)
    is_lost = eqn.primitive.name in jaxprs.STRUCTURED and not inner
    is_inside = is_lost or any(map(_has_mark, inner))
    # A reference is written by one equation and read by another.
    is_reached = any(inputs) or is_inside or (seen.is_any_marked and jaxprs.uses_references(eqn))
    if is_reached and (is_inside or not any(inputs) or (inner and not _is_plain(eqn))):
        seen.unknown[eqn.primitive.name] = None
    return [is_reached] * len(eqn.outvars)


def _is_mark(eqn: jaxprs.JaxprEqn) -> bool:
    return _MARK in _texts(eqn)


def _texts(eqn: jaxprs.JaxprEqn) -> list[str]:
    return [value for value in eqn.params.values() if isinstance(value, str)]


def _has_mark(closed: jaxprs.ClosedJaxpr) -> bool:
    return any(
        _is_mark(eqn) or any(map(_has_mark, jaxprs.inner_jaxprs(eqn))) for eqn in closed.jaxpr.eqns
    )


def _is_plain(eqn: jaxprs.JaxprEqn) -> bool:
    """Checks whether all outputs depend on all inputs by the meaning of a primitive."""
    return eqn.primitive.name.startswith(("reduce", "scatter", "select_and", "custom_linear_solve"))


def _of_while(found: jaxprs.While, inputs: Sequence[bool], follow: _Follow) -> list[bool]:
    of_cond, of_body, start = found.split(inputs)
    carried = found.body.jaxpr.invars[len(of_body) :]

    def step(carry: list[bool]) -> list[bool]:
        # The condition decides every carried value that an iteration changes.
        new = _through(found.body, of_body + carry, follow)
        (is_repeated,) = _through(found.cond, of_cond + carry, follow)
        is_kept = [out is own for out, own in zip(found.body.jaxpr.outvars, carried, strict=True)]
        return [
            before if kept else before | after | is_repeated
            for before, after, kept in zip(carry, new, is_kept, strict=True)
        ]

    return _settled(step, start)


def _of_scan(found: jaxprs.Scan, inputs: Sequence[bool], follow: _Follow) -> list[bool]:
    consts, start, rest = found.split(inputs)
    count = len(start)

    def step(carry: list[bool]) -> list[bool]:
        new = _through(found.body, consts + carry + rest, follow)[:count]
        return [before | after for before, after in zip(carry, new, strict=True)]

    carry = _settled(step, start)
    return carry + _through(found.body, consts + carry + rest, follow)[count:]


def _settled(step: Callable[[list[bool]], list[bool]], marks: list[bool]) -> list[bool]:
    """Repeats a step until no mark is added."""
    while (following := step(marks)) != marks:
        marks = following
    return marks
