"""Marks reach outputs through all kinds of control flow, as found by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from fedjax_dp.core.marks import mark, marks_reaching

X = jax.ShapeDtypeStruct((3,), jnp.float32)
N = jax.ShapeDtypeStruct((), jnp.int32)


@jax.custom_jvp
def with_jvp(a, b):
    return 2 * a


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), 2 * tangents[0]))


@jax.custom_vjp
def with_vjp(a, b):
    return 2 * b


with_vjp.defvjp(lambda a, b: (2 * b, None), lambda residual, g: (g, g))


def of_while(a, b, n):
    """What goes round: a, what is added to it from b, n turns, and what only passes through."""

    def body(carry):
        i, moved, kept, swapped = carry
        return i + 1, moved + b, kept, swapped * 2

    return jax.lax.while_loop(lambda c: c[0] < n, body, (0, a, a, jnp.ones(3)))


def of_scan(a, b, c):
    """b reaches the second carry in one turn and the first in two."""

    def body(carry, x):
        first, second = carry
        return (second, second + b), first + x

    return jax.lax.scan(body, (a, a), c)


def dependence(function, *arguments):
    """The arguments, by position, that each output is computed from: one is marked at a time."""
    found = None
    for i in range(len(arguments)):

        def marked(*given, i=i):
            return function(*given[:i], mark(given[i]), *given[i + 1 :])

        reached = marks_reaching(jax.make_jaxpr(marked)(*arguments)).outputs
        found = found or [set() for _ in reached]
        for sets, is_reached in zip(found, reached, strict=True):
            sets |= {i} if is_reached else set()
    return found


CASES = {
    "passed through": (lambda a, b: (a, b), [{0}, {1}]),
    "not read": (lambda a, b: (a + 1, jnp.zeros_like(b)), [{0}, set()]),
    "only its shape": (lambda a, b: a[: len(b)], [{0}]),
    "jit": (lambda a, b: jax.jit(lambda a, b: (a, b * 2))(a, b), [{0}, {1}]),
    "checkpoint": (lambda a, b: jax.checkpoint(lambda a, b: (a, b * 2))(a, b), [{0}, {1}]),
    "custom_jvp": (with_jvp, [{0}]),
    "custom_vjp": (with_vjp, [{1}]),
    "vmap": (lambda a, b: jax.vmap(lambda x, y: (x, y * x))(a, b), [{0}, {0, 1}]),
    "grad": (lambda a, b: jax.grad(lambda x: jnp.sum(x * x))(a), [{0}]),
    "cond": (
        lambda a, b: jax.lax.cond(a[0] > 0, lambda: (b, b), lambda: (b * 2, jnp.zeros(3))),
        [{0, 1}, {0, 1}],
    ),
    "switch on a constant": (
        lambda a, b: jax.lax.switch(jnp.int32(1), [lambda: a, lambda: b]),
        [{0, 1}],
    ),
    "map": (lambda a, b: jax.lax.map(lambda x: x * 2, b), [{1}]),
    "solve": (lambda a, b: (jnp.linalg.solve(jnp.eye(3), b), a), [{1}, {0}]),
    "sort": (lambda a, b: jnp.sort(b), [{1}]),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_depend_on_what_they_are_computed_from(name):
    function, expected = CASES[name]
    assert dependence(function, X, X) == expected


def test_a_loop_depends_on_its_length_but_for_what_passes_through():
    assert dependence(of_while, X, X, N) == [{2}, {0, 1, 2}, {0}, {2}]


def test_what_is_carried_arrives_after_any_number_of_turns():
    first, second, each = dependence(of_scan, X, X, jax.ShapeDtypeStruct((4, 3), jnp.float32))
    assert first == second == {0, 1} and each == {0, 1, 2}


def test_a_name_ends_a_mark_only_if_it_is_asked_for():
    def named(x):
        return checkpoint_name(mark(x), ""), checkpoint_name(mark(x), "noised")

    closed = jax.make_jaxpr(named)(X)
    assert marks_reaching(closed).outputs == [True, True]
    assert marks_reaching(closed, ends="noised").outputs == [True, False]
