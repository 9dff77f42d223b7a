"""Which inputs of a function its outputs depend on, read off its jaxpr."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from fedjax_dp.core import jaxprs
from fedjax_dp.core.trees import PyTree

# A set of inputs is a whole number, one bit an input; the lowest bit stands for marked arrays.
_Sets = list[int]
_MARKED, _MARK = 1, "fedjax_dp: marked"


def dependence(function: Callable[..., Any], *arguments: Any) -> tuple[PyTree, PyTree]:
    """Finds which leaves of the arguments, by their position, each output depends on; and shapes.

    A value that only passes through reaches an output; one that is read for its shape does not.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    inputs = [2 << i for i in range(len(closed.jaxpr.invars))]
    found = _through(closed.jaxpr, inputs)
    sets = [frozenset(i for i, bit in enumerate(inputs) if bits & bit) for bits in found]
    return jax.tree.unflatten(jax.tree.structure(shapes), sets), shapes


def mark(x: jax.Array) -> jax.Array:
    """Marks an array, so that `marks_reaching` finds what is computed from it."""
    return checkpoint_name(x, _MARK)


def marks_reaching(closed: jaxprs.ClosedJaxpr) -> list[bool]:
    """Finds for each output of a traced function whether a marked array reaches it."""
    found = _through(closed.jaxpr, [0] * len(closed.jaxpr.invars))
    return [bool(bits & _MARKED) for bits in found]


def _through(jaxpr: jaxprs.Jaxpr, inputs: _Sets) -> _Sets:
    """Follows sets of inputs through a jaxpr; its constants depend on nothing."""
    closed = jaxprs.ClosedJaxpr(jaxpr, [0] * len(jaxpr.constvars))
    return jaxprs.evaluate(closed, inputs, _of_equation, literal=lambda v: 0)


def _of_equation(eqn: jaxprs.JaxprEqn, *inputs: int) -> _Sets:
    name = eqn.primitive.name
    if name == "name" and eqn.params["name"] == _MARK:
        return [inputs[0] | _MARKED]
    if name == "while":
        return _of_while(eqn, inputs)
    if name == "scan":
        return _of_scan(eqn, inputs)
    if name == "cond":
        branches = [_through(branch, list(inputs[1:])) for branch in jaxprs.inner_jaxprs(eqn)]
        return [_union(sets) | inputs[0] for sets in zip(*branches, strict=True)]
    body = jaxprs.body_of(eqn)
    if body is not None and len(body.jaxpr.invars) == len(inputs):
        return _through(body.jaxpr, list(inputs))
    return [_union(inputs)] * len(eqn.outvars)


def _of_while(eqn: jaxprs.JaxprEqn, inputs: Sequence[int]) -> _Sets:
    cond, body, of_cond, of_body, start = jaxprs.parts_of_while(eqn, inputs)
    carried = body.jaxpr.invars[len(of_body) :]

    def step(carry: _Sets) -> _Sets:
        # Whether there is one more turn decides over all that is carried and changed by a turn.
        new = _through(body.jaxpr, of_body + carry)
        (is_repeated,) = _through(cond.jaxpr, of_cond + carry)
        is_kept = [out is own for out, own in zip(body.jaxpr.outvars, carried, strict=True)]
        return [
            before if kept else before | after | is_repeated
            for before, after, kept in zip(carry, new, is_kept, strict=True)
        ]

    return _settled(step, start)


def _of_scan(eqn: jaxprs.JaxprEqn, inputs: Sequence[int]) -> _Sets:
    body, consts, start, rest = jaxprs.parts_of_scan(eqn, inputs)
    count = len(start)

    def step(carry: _Sets) -> _Sets:
        new = _through(body.jaxpr, consts + carry + rest)[:count]
        return [before | after for before, after in zip(carry, new, strict=True)]

    carry = _settled(step, start)
    return carry + _through(body.jaxpr, consts + carry + rest)[count:]


def _settled(step: Callable[[_Sets], _Sets], sets: _Sets) -> _Sets:
    """Repeats a step until nothing is added; sets only grow, and there are finitely many."""
    while (following := step(sets)) != sets:
        sets = following
    return sets


def _union(sets: Sequence[int]) -> int:
    total = 0
    for each in sets:
        total |= each
    return total
