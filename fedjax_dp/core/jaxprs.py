"""Traced functions and primitives: the one file that follows how JAX represents them.

JAX documents none of this. What a version represents in another way than is known here has no
layout and no parameters, and callers do without: such an equation is evaluated as it was traced.
`tests/core/test_undocumented_jax.py` lists what is read, and says which version changed it.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from fedjax_dp.core import checks

CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
CHECKPOINTS = frozenset({"remat", "remat2", "checkpoint"})
CONTROL_FLOW = frozenset({"scan", "while", "cond"})
CUSTOM_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})
# Primitives whose rule for batches is the user's, unless it calls them for one member at a time.
OWN_BATCHES = frozenset({"pure_callback", "ffi_call", "custom_vmap_call"})
_ONE_BY_ONE = ("sequential", "sequential_unrolled")

_OF_WINDOWS = {
    *("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation"),
}
# Of plain primitives that are read or replaced.
PARAMETERS = {
    "dot_general": {"dimension_numbers", "out_sharding", "precision", "preferred_element_type"},
    "conv_general_dilated": {
        *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"),
        *("feature_group_count", "batch_group_count", "precision", "preferred_element_type"),
        "out_sharding",
    },
    "reduce_window_max": _OF_WINDOWS,
    "reduce_window_min": _OF_WINDOWS,
    "reduce_window_sum": _OF_WINDOWS,
    "select_and_gather_add": {*_OF_WINDOWS, "select_prim"},
    "select_and_scatter_add": {"window_dimensions", "window_strides", "padding", "select_prim"},
    "transpose": {"permutation"},
    "convert_element_type": {"new_dtype", "weak_type", "sharding"},
    "gather": {
        *("dimension_numbers", "slice_sizes", "indices_are_sorted", "unique_indices", "mode"),
        "fill_value",
    },
}


def evaluate_equation(eqn: JaxprEqn, *operands: Any) -> list[Any]:
    """Evaluates an equation as it was traced."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    # Before jax 0.9 the functions of a call came separately from the other parameters.
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    outputs = eqn.primitive.bind(*functions, *operands, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def evaluate(
    closed: ClosedJaxpr,
    arguments: Iterable[Any],
    rule: Callable[..., Sequence[Any]] = evaluate_equation,
    *,
    literal: Callable[[Literal], Any] = lambda v: v.val,
    constant: Callable[[Any], Any] = lambda value: value,
) -> list[Any]:
    """Evaluates a jaxpr, every equation by `rule(eqn, *operands)`."""
    jaxpr = closed.jaxpr
    known = dict(zip(jaxpr.constvars, map(constant, closed.consts), strict=True))
    known.update(zip(jaxpr.invars, arguments, strict=True))
    return _run(jaxpr.eqns, known, jaxpr.outvars, rule, literal)


def compute(wanted: Var, eqns: Sequence[JaxprEqn], known: Mapping[Var, Any]) -> Any:
    """Evaluates the equations that lead from known variables to another, and no others."""
    steps, _ = _leading_to([wanted], eqns, known)
    return _run(steps, dict(known), [wanted], evaluate_equation, lambda v: v.val)[0]


def of_shapes(name: str, fn: Callable[..., Any], *shapes: Any) -> Any:
    """Evaluates what depends on the shapes of arrays alone, none of which is made."""
    closed, structure = jax.make_jaxpr(fn, return_shape=True)(*shapes)
    jaxpr = closed.jaxpr
    known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    wanted = [v for v in jaxpr.outvars if not isinstance(v, Literal)]
    steps, needed = _leading_to(wanted, jaxpr.eqns, known)
    rule, is_of_shapes = "depend on the shapes of inputs alone", needed.isdisjoint(jaxpr.invars)
    checks.require(is_of_shapes, name, rule, "values computed from their entries")
    values = _run(steps, known, jaxpr.outvars, evaluate_equation, lambda v: v.val)
    return jax.tree.unflatten(jax.tree.structure(structure), values)


def _leading_to(
    wanted: Sequence[Var], eqns: Sequence[JaxprEqn], known: Mapping[Var, Any]
) -> tuple[list[JaxprEqn], set[Var]]:
    """Finds the equations that lead from known variables to others, and all that they need."""
    needed, steps = set(wanted), []
    for eqn in reversed(eqns):
        if not needed.isdisjoint(eqn.outvars):
            steps.append(eqn)
            needed.update(v for v in variables(eqn) if v not in known)
    return steps[::-1], needed


def _run(
    eqns: Iterable[JaxprEqn],
    known: dict[Var, Any],
    wanted: Sequence[Any],
    rule: Callable[..., Sequence[Any]],
    literal: Callable[[Literal], Any],
) -> list[Any]:
    def read(v: Any) -> Any:
        return literal(v) if isinstance(v, Literal) else known[v]

    for eqn in eqns:
        operands = [read(v) for v in eqn.invars]
        with eqn.ctx.manager:
            known.update(zip(eqn.outvars, rule(eqn, *operands), strict=True))
    return [read(v) for v in wanted]


def variables(eqn: JaxprEqn) -> list[Var]:
    """Lists the inputs of an equation that are not literals."""
    return [v for v in eqn.invars if not isinstance(v, Literal)]


def inputs_read(closed: ClosedJaxpr) -> list[bool]:
    """Finds for each input of a traced function whether an equation or the result reads it."""
    read = {v for eqn in closed.jaxpr.eqns for v in variables(eqn)}
    read |= {v for v in closed.jaxpr.outvars if not isinstance(v, Literal)}
    return [v in read for v in closed.jaxpr.invars]


def has_parameters(eqn: JaxprEqn) -> bool:
    """Checks whether an equation of a plain primitive has the parameters that are known, alone."""
    return set(eqn.params) == PARAMETERS.get(eqn.primitive.name)


def inner_jaxprs(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """Lists the jaxprs among the parameters of an equation."""
    return list(_jaxprs_in(eqn.params))


def _jaxprs_in(value: Any) -> Iterable[ClosedJaxpr]:
    if isinstance(value, ClosedJaxpr):
        yield value
    elif isinstance(value, Jaxpr):
        yield ClosedJaxpr(value, ())
    elif isinstance(value, Mapping):
        yield from _jaxprs_in(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _jaxprs_in([getattr(value, f.name, None) for f in dataclasses.fields(value)])
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _jaxprs_in(item)


def uses_references(eqn: JaxprEqn) -> bool:
    """Checks whether an equation makes, reads or writes a mutable array."""
    return any(hasattr(v.aval, "inner_aval") for v in (*eqn.invars, *eqn.outvars))


def has_primitive(closed: ClosedJaxpr, name: str) -> bool:
    """Checks whether a jaxpr, or one inside of it, has an equation of a primitive."""
    return any(
        eqn.primitive.name == name or any(has_primitive(body, name) for body in inner_jaxprs(eqn))
        for eqn in closed.jaxpr.eqns
    )


def require_apart(closed: ClosedJaxpr) -> None:
    """Refuses equations that receive the members of a batch together, and so may mix them."""
    for eqn in closed.jaxpr.eqns:
        name, method = eqn.primitive.name, eqn.params.get("vmap_method")
        rule = (
            "not be called with all of a batch, which may mix examples and clients, where privacy "
            "is claimed; nearest valid choices: vmap_method='sequential', or operations of JAX"
        )
        is_own = name in OWN_BATCHES and method not in _ONE_BY_ONE
        checks.require(not is_own, name, rule, method or "a rule of its own")
        for body in inner_jaxprs(eqn):
            require_apart(body)


class Scan(NamedTuple):
    """A loop over arrays: what all steps read, what they carry, and an entry of each array."""

    body: ClosedJaxpr
    num_consts: int
    num_carry: int
    options: dict[str, Any]

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Divides operands into constants, carry and arrays."""
        return _split(operands, self.num_consts, self.num_carry)

    def is_valid(self, num_in: int, num_out: int) -> bool:
        """Checks the numbers of inputs and outputs."""
        return _fits(self.body, num_in, num_out) and self.num_consts + self.num_carry <= num_in


class While(NamedTuple):
    """A loop with a condition, and how many constants condition and body have."""

    cond: ClosedJaxpr
    body: ClosedJaxpr
    num_of_cond: int
    num_of_body: int

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Divides operands into constants of the condition, those of the body, and carry."""
        return _split(operands, self.num_of_cond, self.num_of_body)

    def is_valid(self, num_in: int, num_out: int) -> bool:
        """Checks the numbers of inputs and outputs."""
        return (
            _fits(self.cond, self.num_of_cond + num_out, 1)
            and _fits(self.body, self.num_of_body + num_out, num_out)
            and self.num_of_cond + self.num_of_body + num_out == num_in
        )


class Cond(NamedTuple):
    """A choice of branches by the first operand, on the others."""

    branches: tuple[ClosedJaxpr, ...]

    def is_valid(self, num_in: int, num_out: int) -> bool:
        """Checks the numbers of inputs and outputs."""
        return all(_fits(branch, num_in - 1, num_out) for branch in self.branches)


class Call(NamedTuple):
    """A function of the operands: a call, a checkpoint or one with derivatives of its own."""

    body: ClosedJaxpr
    options: dict[str, Any]

    def is_valid(self, num_in: int, num_out: int) -> bool:
        """Checks the numbers of inputs and outputs."""
        return _fits(self.body, num_in, num_out)


def layout(eqn: JaxprEqn) -> Scan | While | Cond | Call | None:
    """Returns what a structured equation is made of, or None if that is not known."""
    if eqn.primitive.name not in _LAYOUTS:
        return None
    try:
        structure = _LAYOUTS[eqn.primitive.name](eqn.params)
        return structure if structure.is_valid(len(eqn.invars), len(eqn.outvars)) else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _scan(params: Mapping[str, Any]) -> Scan:
    if "num_consts" in params:
        counts = params["num_consts"], params["num_carry"]
    else:
        # Since jax 0.11.
        consts, carry, _ = params["ft_in"].unpack()
        counts = len(consts), len(carry)
    return Scan(_closed(params["jaxpr"]), *counts, _options(params, "length", "reverse", "unroll"))


def _while(params: Mapping[str, Any]) -> While:
    jaxprs = _closed(params["cond_jaxpr"]), _closed(params["body_jaxpr"])
    return While(*jaxprs, params["cond_nconsts"], params["body_nconsts"])


def _cond(params: Mapping[str, Any]) -> Cond:
    return Cond(tuple(map(_closed, params["branches"])))


def _call(params: Mapping[str, Any]) -> Call:
    return Call(_closed(params["jaxpr" if "jaxpr" in params else "call_jaxpr"]), {})


def _checkpoint(params: Mapping[str, Any]) -> Call:
    return Call(_closed(params["jaxpr"]), _options(params, "prevent_cse", "policy"))


_LAYOUTS: dict[str, Callable[[Mapping[str, Any]], Scan | While | Cond | Call]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    **dict.fromkeys(CALLS | CUSTOM_RULES, _call),
    **dict.fromkeys(CHECKPOINTS, _checkpoint),
}
STRUCTURED = frozenset(_LAYOUTS)


def _options(params: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: params[name] for name in names}


def _closed(found: Any) -> ClosedJaxpr:
    (closed,) = _jaxprs_in(found)
    return closed


def _fits(closed: ClosedJaxpr, num_in: int, num_out: int) -> bool:
    return len(closed.jaxpr.invars) == num_in and len(closed.jaxpr.outvars) == num_out


def _split(
    values: Sequence[Any], first: int, second: int
) -> tuple[list[Any], list[Any], list[Any]]:
    both = first + second
    return list(values[:first]), list(values[first:both]), list(values[both:])


def inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Traces a jaxpr again with its calls inlined."""

    def inline(eqn: JaxprEqn, *operands: Any) -> list[Any]:
        structure = layout(eqn) if eqn.primitive.name in CALLS else None
        if not isinstance(structure, Call):
            return evaluate_equation(eqn, *operands)
        return evaluate(structure.body, operands, inline)

    return jax.make_jaxpr(lambda *arguments: evaluate(closed, arguments, inline))(*closed.in_avals)


def evaluate_structure(
    found: Scan | While | Cond | Call, run: Callable[..., list[Any]], operands: Sequence[Any]
) -> list[Any]:
    """Evaluates a call, checkpoint, loop or branch, its inner jaxprs by `run(jaxpr, operands)`."""
    if isinstance(found, Scan):
        consts, carry, xs = found.split(operands)

        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            outputs = run(found.body, [*consts, *carry, *x])
            return outputs[: len(carry)], outputs[len(carry) :]

        carry, ys = lax.scan(step, carry, xs, **found.options)
        return [*carry, *ys]
    if isinstance(found, While):
        of_cond, of_body, carry = found.split(operands)

        def continues(state: list[Any]) -> Any:
            return run(found.cond, [*of_cond, *state])[0]

        def advance(state: list[Any]) -> list[Any]:
            after = run(found.body, [*of_body, *state])
            if not found.cond.out_avals[0].shape:
                return after
            # Of a loop under vmap: each member stops by its own condition.
            goes = continues(state)
            return [
                jnp.where(jnp.expand_dims(goes, range(goes.ndim, new.ndim)), new, old)
                for new, old in zip(after, state, strict=True)
            ]

        return lax.while_loop(lambda state: jnp.any(continues(state)), advance, carry)
    if isinstance(found, Cond):
        branches = [functools.partial(lambda b, *x: run(b, x), b) for b in found.branches]
        return lax.switch(operands[0], branches, *operands[1:])
    if found.options:
        return jax.checkpoint(lambda *x: run(found.body, x), **found.options)(*operands)
    return run(found.body, operands)


def define(
    name: str,
    fn: Callable[..., jax.Array],
    *,
    abstract: Callable[..., Any],
    batch: Callable[..., tuple[jax.Array, Any]],
    transpose: Callable[..., list[Any]] | None = None,
    gradients: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    on: Mapping[str, Callable[..., jax.Array]] = {},
    eager: Callable[..., jax.Array] | None = None,
) -> Primitive:
    """Defines a primitive of one result, linear by its `transpose` or bilinear by `gradients`.

    `on` has functions for platforms on which others are compiled than `fn`.
    """
    primitive = Primitive(name)

    @functools.partial(jax.jit, static_argnames="params")
    def compiled(*operands: jax.Array, params: tuple[tuple[str, Any], ...]) -> jax.Array:
        return fn(*operands, **dict(params))

    def run(*operands: jax.Array, **params: Any) -> jax.Array:
        return compiled(*operands, params=tuple(params.items()))

    primitive.def_impl(eager or run)
    primitive.def_abstract_eval(abstract)
    for platform, lowering in ((None, fn), *on.items()):
        rule = mlir.lower_fun(lowering, multiple_results=False)
        mlir.register_lowering(primitive, rule, platform=platform)
    if transpose is not None:
        ad.deflinear2(primitive, transpose)
    if gradients is not None:
        ad.defbilinear(primitive, *gradients)
    batching.primitive_batchers[primitive] = batch
    return primitive
