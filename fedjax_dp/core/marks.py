"""Marks on arrays, and which outputs of a traced function are computed from a marked array."""

from collections.abc import Callable, Sequence

import jax
from jax.ad_checkpoint import checkpoint_name

from fedjax_dp.core import jaxprs

_MARK = "fedjax_dp: marked"


def mark(x: jax.Array) -> jax.Array:
    """Marks an array, so that `marks_reaching` finds what is computed from it."""
    return checkpoint_name(x, _MARK)


def marks_reaching(closed: jaxprs.ClosedJaxpr) -> list[bool]:
    """Finds for each output of a traced function whether a marked array reaches it."""
    return _through(closed.jaxpr, [False] * len(closed.jaxpr.invars))


def _through(jaxpr: jaxprs.Jaxpr, inputs: list[bool]) -> list[bool]:
    """Follows marks through a jaxpr; its constants have none."""
    closed = jaxprs.ClosedJaxpr(jaxpr, [False] * len(jaxpr.constvars))
    return jaxprs.evaluate(closed, inputs, _of_equation, literal=lambda v: False)


def _of_equation(eqn: jaxprs.JaxprEqn, *inputs: bool) -> list[bool]:
    name = eqn.primitive.name
    if name == "name" and eqn.params["name"] == _MARK:
        return [True]
    if name == "while":
        return _of_while(eqn, inputs)
    if name == "scan":
        return _of_scan(eqn, inputs)
    if name == "cond":
        branches = [_through(branch, list(inputs[1:])) for branch in jaxprs.inner_jaxprs(eqn)]
        return [any(sets) or inputs[0] for sets in zip(*branches, strict=True)]
    body = jaxprs.body_of(eqn)
    if body is not None and len(body.jaxpr.invars) == len(inputs):
        return _through(body.jaxpr, list(inputs))
    return [any(inputs)] * len(eqn.outvars)


def _of_while(eqn: jaxprs.JaxprEqn, inputs: Sequence[bool]) -> list[bool]:
    cond, body, of_cond, of_body, start = jaxprs.parts_of_while(eqn, inputs)
    carried = body.jaxpr.invars[len(of_body) :]

    def step(carry: list[bool]) -> list[bool]:
        # The condition decides every carried value that an iteration changes.
        new = _through(body.jaxpr, of_body + carry)
        (is_repeated,) = _through(cond.jaxpr, of_cond + carry)
        is_kept = [out is own for out, own in zip(body.jaxpr.outvars, carried, strict=True)]
        return [
            before if kept else before | after | is_repeated
            for before, after, kept in zip(carry, new, is_kept, strict=True)
        ]

    return _settled(step, start)


def _of_scan(eqn: jaxprs.JaxprEqn, inputs: Sequence[bool]) -> list[bool]:
    body, consts, start, rest = jaxprs.parts_of_scan(eqn, inputs)
    count = len(start)

    def step(carry: list[bool]) -> list[bool]:
        new = _through(body.jaxpr, consts + carry + rest)[:count]
        return [before | after for before, after in zip(carry, new, strict=True)]

    carry = _settled(step, start)
    return carry + _through(body.jaxpr, consts + carry + rest)[count:]


def _settled(step: Callable[[list[bool]], list[bool]], marks: list[bool]) -> list[bool]:
    """Repeats a step until no mark is added."""
    while (following := step(marks)) != marks:
        marks = following
    return marks
