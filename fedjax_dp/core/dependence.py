"""Which inputs of a function its outputs depend on, read off its jaxpr."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from fedjax_dp.core.trees import PyTree

# A set of inputs is a whole number, one bit an input; the lowest bit stands for marked arrays.
_Sets = list[int]
_MARKED, _MARK = 1, "fedjax_dp: marked"


def dependence(function: Callable[..., Any], *arguments: Any) -> tuple[PyTree, PyTree]:
    """Finds, for every leaf of a function's output, which leaves of its arguments reach it.

    A value that only passes through reaches it; one that is read for its shape does not, nor one
    that is read for other outputs.

    Args:
      function: of arrays; it is traced and not run.
      *arguments: arrays or shapes.

    Returns:
      The structure of the output, at each leaf the set of the positions of the leaves of
      `arguments`, flattened one after the other, that it depends on; and its shapes.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    inputs = [2 << i for i in range(len(closed.jaxpr.invars))]
    found = _through(closed.jaxpr, inputs)
    sets = [frozenset(i for i, bit in enumerate(inputs) if bits & bit) for bits in found]
    return jax.tree.unflatten(jax.tree.structure(shapes), sets), shapes


def mark(x: jax.Array) -> jax.Array:
    """Marks an array, so that `marks_reaching` finds what is computed from it.

    Args:
      x: an array.

    Returns:
      The same array.
    """
    return checkpoint_name(x, _MARK)


def marks_reaching(closed: core.ClosedJaxpr) -> list[bool]:
    """Finds which outputs of a traced function depend on arrays that were marked inside it.

    Args:
      closed: the function's jaxpr.

    Returns:
      For each output whether a marked array reaches it.
    """
    found = _through(closed.jaxpr, [0] * len(closed.jaxpr.invars))
    return [bool(bits & _MARKED) for bits in found]


def _through(jaxpr: Any, inputs: _Sets) -> _Sets:
    """Follows sets of inputs through a jaxpr; its constants depend on nothing."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(atom: Any) -> int:
        return 0 if isinstance(atom, core.Literal) else known.get(atom, 0)

    for equation in jaxpr.eqns:
        outputs = _of_equation(equation, [of(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, outputs, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _of_equation(equation: Any, inputs: _Sets) -> _Sets:
    params = equation.params
    name = equation.primitive.name
    if name == "name" and params["name"] == _MARK:
        return [inputs[0] | _MARKED]
    if name == "while":
        return _of_while(params, inputs)
    if name == "scan":
        return _of_scan(params, inputs)
    if name == "cond":
        branches = [_through(branch.jaxpr, inputs[1:]) for branch in params["branches"]]
        return [_union(sets) | inputs[0] for sets in zip(*branches, strict=True)]
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = params.get(key)
        inner = getattr(inner, "jaxpr", inner)
        if inner is not None and len(inner.invars) == len(inputs):
            return _through(inner, inputs)
    return [_union(inputs)] * len(equation.outvars)


def _of_while(params: Any, inputs: _Sets) -> _Sets:
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body = inputs[:num_cond], inputs[num_cond : num_cond + num_body]
    cond, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr

    def step(carry: _Sets) -> _Sets:
        # Whether there is one more turn decides over all that is carried and changed by a turn.
        new = _through(body, of_body + carry)
        (goes_on,) = _through(cond, of_cond + carry)
        is_kept = [
            out is own for out, own in zip(body.outvars, body.invars[num_body:], strict=True)
        ]
        return [
            before if kept else before | after | goes_on
            for before, after, kept in zip(carry, new, is_kept, strict=True)
        ]

    return _settled(step, inputs[num_cond + num_body :])


def _of_scan(params: Any, inputs: _Sets) -> _Sets:
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, rest = inputs[:num_consts], inputs[num_consts + num_carry :]
    body = params["jaxpr"].jaxpr

    def step(carry: _Sets) -> _Sets:
        new = _through(body, consts + carry + rest)[:num_carry]
        return [before | after for before, after in zip(carry, new, strict=True)]

    carry = _settled(step, inputs[num_consts : num_consts + num_carry])
    return carry + _through(body, consts + carry + rest)[num_carry:]


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
