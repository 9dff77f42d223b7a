"""Kinds of parameters, chosen by path or predicate.

A parameter is *trained*; or a *buffer*, which no gradient reaches and training refreshes; or
*frozen*: the model holds its value, and `init` does not return it.
"""

import contextlib
import contextvars
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core import checks, trees
from fedjax_dp.core.backend import traced_with
from fedjax_dp.core.devices import undivided
from fedjax_dp.core.files import digest_of
from fedjax_dp.core.synonyms import suggestion
from fedjax_dp.core.trees import PyTree

Where = str | Sequence[str] | Callable[[str, Any], bool]
# Matches the layers of batch norm in the choice of parameters that stay with a client.
BATCH_NORM = "batch_norm"

# Values of frozen parameters while a function that takes them as an argument is traced.
_GIVEN: contextvars.ContextVar[Mapping[int, Sequence[Any]]] = contextvars.ContextVar("given")
# The parts whose values were read since `reads` was entered; None outside.
_READ: contextvars.ContextVar[list["Frozen"] | None] = contextvars.ContextVar("read", default=None)
# Part of the key under which JAX caches traces, so that none with other values is reused.
_TRACE = jax.make_user_context()


def marked(params: PyTree, where: Where) -> PyTree:
    """Marks the parameters that match a path, pattern, prefix, several of these, or a predicate."""
    leaves, structure = jax.tree.flatten(params)
    paths = trees.paths(params)
    if callable(where):
        flags = [bool(where(path, leaf)) for path, leaf in zip(paths, leaves, strict=True)]
    else:
        flags = [any(matches(path, p) for p in patterns(where)) for path in paths]
    return jax.tree.unflatten(structure, flags)


def patterns(where: str | Sequence[str]) -> tuple[str, ...]:
    """Lists patterns that may have been given as one."""
    return (where,) if isinstance(where, str) else tuple(where)


class Frozen(NamedTuple):
    """Frozen parameters and their places in the tree."""

    structure: jax.tree_util.PyTreeDef  # Of all parameters.
    values: tuple[np.ndarray | None, ...]  # None for trained leaves and buffers.

    def without(self, full: PyTree) -> PyTree:
        """Replaces the frozen parameters by None, which is not a leaf."""
        pairs = zip(jax.tree.leaves(full), self.values, strict=True)
        return jax.tree.unflatten(self.structure, [x if v is None else None for x, v in pairs])

    def within(self, params: PyTree) -> PyTree:
        """Puts the frozen parameters back into what `without` returned."""
        read = _READ.get()
        if read is not None and all(part.values is not self.values for part in read):
            read.append(self)
        given = jax.tree.leaves(undivided(params))
        count = sum(value is None for value in self.values)
        rule = f"hold the {count} arrays that are not frozen"
        checks.require(len(given) == count, "params", rule, len(given))
        supply, held = iter(given), iter(_GIVEN.get({}).get(id(self.values), self.constants))
        leaves = [next(supply) if v is None else jnp.asarray(next(held)) for v in self.values]
        return jax.tree.unflatten(self.structure, leaves)

    @property
    def constants(self) -> tuple[np.ndarray, ...]:
        """The frozen values alone, in order."""
        return tuple(value for value in self.values if value is not None)


def digest(parts: Sequence[Frozen]) -> str:
    """Computes the SHA-256 of frozen parameters with their paths; empty if there are none."""
    parts_of_digest: list[Any] = []
    for part in parts:
        tree = jax.tree.unflatten(part.structure, part.values)
        for path, value in zip(trees.paths(tree), part.constants, strict=True):
            facts = f"{path} {value.dtype} {value.shape}\n"
            parts_of_digest += [
                facts.encode(),
                np.ascontiguousarray(value).reshape(-1).view(np.uint8),
            ]
    return digest_of(parts_of_digest).hex() if parts_of_digest else ""


@contextlib.contextmanager
def given(parts: Sequence[Frozen], constants: Sequence[Sequence[Any]]) -> Iterator[None]:
    """Reads frozen values from `constants`, arrays that may be traced, within the context."""
    if not parts:
        yield
        return
    arrays = {id(part.values): c for part, c in zip(parts, constants, strict=True)}
    with traced_with(_GIVEN, {**_GIVEN.get({}), **arrays}), _TRACE(object()):
        yield


@contextlib.contextmanager
def reads() -> Iterator[list[Frozen]]:
    """Lists the frozen parameters that functions read while they are traced in the context.

    A trace that JAX has cached reads nothing again; its program then holds their values.
    """
    frozen_parts: list[Frozen] = []
    with traced_with(_READ, frozen_parts):
        yield frozen_parts


def frozen(shapes: PyTree, where: Where, values: PyTree) -> Frozen:
    """Holds the values of the parameters that `where` matches, in the model's types."""
    paths = trees.paths(shapes)
    if not callable(where):
        require_matches("frozen", patterns(where), paths, "parameters of the model")
    flags = jax.tree.leaves(marked(shapes, where))
    checks.require(any(flags), "frozen", "name at least one parameter", where)
    checks.require(not all(flags), "frozen", f"leave one of {paths} to be trained", where)
    return held(shapes, flags, values)


def held(shapes: PyTree, flags: Sequence[bool], values: PyTree) -> Frozen:
    """Holds the values of the parameters whose flags are set, in the model's types."""
    given = dict(zip(trees.paths(values), jax.tree.leaves(values), strict=True))
    kept: list[np.ndarray | None] = []
    parameters = zip(trees.paths(shapes), jax.tree.leaves(shapes), flags, strict=True)
    for path, shape, is_frozen in parameters:
        if is_frozen:
            checks.require(path in given, "params", f"hold a value of {path!r}", sorted(given))
            rule = f"have the shape {shape.shape}"
            given_shape = np.shape(given[path])
            checks.require(given_shape == shape.shape, f"params[{path!r}]", rule, given_shape)
            if jnp.issubdtype(shape.dtype, jnp.floating):
                require_real(f"params[{path!r}]", given[path])
        kept.append(np.asarray(given[path], shape.dtype) if is_frozen else None)
    return Frozen(jax.tree.structure(shapes), tuple(kept))


def require_real(what: str, value: Any) -> None:
    """Requires real numbers for parameters, to whose type others would be cut."""
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    real = (np.bool_, jnp.integer, jnp.floating)
    is_real = any(jnp.issubdtype(dtype, kind) for kind in real)
    checks.require(is_real, what, "hold real numbers", str(dtype))


def require_floats(before: PyTree, after: PyTree = None) -> None:
    """Requires state of floats, where it is not the same array afterwards."""
    leaves = jax.tree.leaves(before)
    way_out = "keep it out of the parameters" if after is None else "leave it unchanged"
    new = [None] * len(leaves) if after is None else jax.tree.leaves(after)
    for path, old, changed in zip(trees.paths(before), leaves, new, strict=True):
        fits = changed is old or jnp.issubdtype(jnp.result_type(old), jnp.floating)
        rule = (
            "be floating-point, since it is averaged over clients: hold it as float32, or "
            f"{way_out}"
        )
        checks.require(fits, f"state {path}", rule, str(jnp.result_type(old)))


class Home(NamedTuple):
    """Which parameters stay with their client, and which are shared."""

    structure: jax.tree_util.PyTreeDef  # Of all parameters.
    is_own: tuple[bool, ...]  # Of each leaf, whether it stays with the client.

    def own(self, params: PyTree) -> PyTree:
        """Takes the client's own parameters; None, which is no leaf, replaces the shared ones."""
        return self._of(params, True)

    def sent(self, params: PyTree) -> PyTree:
        """Takes the shared parameters; None replaces the client's own."""
        return self._of(params, False)

    def joined(self, sent: PyTree, own: PyTree) -> PyTree:
        """Joins the results of `sent` and `own`; other entries of either are ignored."""
        of_both = zip(
            self.structure.flatten_up_to(sent),
            self.structure.flatten_up_to(own),
            self.is_own,
            strict=True,
        )
        return jax.tree.unflatten(self.structure, [o if flag else s for s, o, flag in of_both])

    @property
    def is_sent(self) -> PyTree:
        """Marks what is shared, a tree of bools."""
        return jax.tree.unflatten(self.structure, [not flag for flag in self.is_own])

    def _of(self, params: PyTree, wanted: bool) -> PyTree:
        pairs = zip(self.structure.flatten_up_to(params), self.is_own, strict=True)
        return jax.tree.unflatten(
            self.structure, [x if flag is wanted else None for x, flag in pairs]
        )


def home(shapes: PyTree, where: Where, buffer_keys: Where = (), *, name: str = "home") -> Home:
    """Decides which parameters stay with their client; "batch_norm" alone may match nothing."""
    paths = trees.paths(shapes)
    asked: tuple[str, ...] = () if callable(where) else patterns(where)
    others: Where = where if callable(where) else tuple(p for p in asked if p != BATCH_NORM)
    if not callable(others):
        require_matches(name, others, paths, "parameters of the model or 'batch_norm'")
    flags = jax.tree.leaves(marked(shapes, others))
    if BATCH_NORM in asked:
        of_norm = jax.tree.leaves(batch_norm(shapes, buffer_keys))
        flags = [flag or norm for flag, norm in zip(flags, of_norm, strict=True)]
    may_be_none = not callable(where) and set(asked) <= {BATCH_NORM}
    checks.require(any(flags) or may_be_none, name, f"match one of {paths}", where)
    checks.require(not all(flags), name, f"leave one of {paths} to be shared", where)
    return Home(jax.tree.structure(shapes), tuple(flags))


def require_matches(name: str, asked: Sequence[str], paths: Sequence[str], rule: str) -> None:
    """Requires that every pattern matches a path; the error names the nearest one."""
    for pattern in asked:
        if not any(matches(path, pattern) for path in paths):
            parts = [path.split("/") for path in paths]
            known = {"/".join(part[:end]) for part in parts for end in range(1, len(part) + 1)}
            hint = suggestion(pattern, sorted(known)) or f"; there are {checks.listed(paths)}"
            raise ValueError(f"{name} must name {rule}, got {pattern!r}{hint}")


def batch_norm(params: PyTree, buffer_keys: Where) -> PyTree:
    """Marks buffers and the other parameters of their layers; frozen statistics are not buffers."""
    paths, is_buffer = trees.paths(params), jax.tree.leaves(marked(params, buffer_keys))
    layers = {_layer(path) for path, flag in zip(paths, is_buffer, strict=True) if flag}
    layers.discard("")
    flags = [flag or _layer(path) in layers for path, flag in zip(paths, is_buffer, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(params), flags)


def _layer(path: str) -> str:
    """Names the layer of a parameter: its path without collection and leaf."""
    return "/".join(path.split("/")[1:-1])


def matches(path: str, pattern: str) -> bool:
    """Checks whether a pattern matches a path or one of its prefixes."""
    pattern = pattern.rstrip("/")
    return any(fnmatch.fnmatchcase(path, form) for form in (pattern, f"{pattern}/*"))
