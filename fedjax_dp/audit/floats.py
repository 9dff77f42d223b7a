"""Searches for floats that break a bound: records that move a clipped sum, long updates.

Arrays of many short axes are searched too, whose norms a compiler may add up in one long chain.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.audit.noise import StepCheck, distance
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.gradients import GradientRule
from fedjax_dp.core import checks
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import flat, nested
from fedjax_dp.privacy.mechanisms.clipping import clip_by_global_norm, clip_by_l1_norm

_VALUES = (0.0, 1e-30, 1e30, -1e30, np.nan, np.inf, -np.inf)
# Rows that nearly cancel: their size, and the relative size of their sum.
_SIZES = (1.0, 1e3, 1e6)
_SHARES = (0.0, 1e-4, 3e-4, 5e-4, 7e-4, 1e-3, 1.5e-3, 2e-3, 3e-3)
# Allowed rounding above a bound (docs/privacy/proofs.md, "Clipping in floating point").
MARGIN = 1e-3

# Ranks and axis lengths of the arrays, and the most entries of one.
RANKS, LENGTHS = range(1, 25), range(1, 9)
_MOST_ENTRIES = 2**20
# How many shapes are compiled together.
_SHAPES = 8

_LARGEST_EXPONENT, _SMALLEST_EXPONENT = 127, -149
# Critical exponents: squares vanish or overflow, sums absorb, floats end.
_EDGES = (-149, -126, -75, -63, -30, -12, 0, 12, 23, 43, 60, 63, 64, 100, 127)


def extreme_records(
    record: Mapping[str, np.ndarray], rng: np.random.Generator
) -> Iterator[dict[str, np.ndarray]]:
    """Lists extreme records, whose clipped gradients must respect the bound.

    The record itself; one value from 0 to 1e30, NaN and infinities; rows that nearly cancel, for
    which norms that are not computed from the gradient are wrong. Integers are 0 or the largest.
    """
    yield {name: np.asarray(array) for name, array in record.items()}
    for value in _VALUES:
        yield {name: _filled(np.asarray(array), value) for name, array in record.items()}
    for size in _SIZES:
        for share in _SHARES:
            yield {
                name: _cancelling(np.asarray(array), size, share, rng)
                for name, array in record.items()
            }


def _filled(array: np.ndarray, value: float) -> np.ndarray:
    if array.dtype.kind == "f":
        return np.full_like(array, value)
    return np.full_like(array, np.iinfo(array.dtype).max if value > 1 else 0)


def _cancelling(
    array: np.ndarray, size: float, share: float, rng: np.random.Generator
) -> np.ndarray:
    if array.dtype.kind != "f":
        return array
    if array.ndim == 0:
        return np.asarray(size, array.dtype)
    row = size * rng.normal(size=array.shape[1:])
    signs = (-1.0) ** np.arange(array.shape[0]).reshape(-1, *[1] * (array.ndim - 1))
    return (signs * row + size * share * rng.normal(size=array.shape)).astype(array.dtype)


def extreme_updates(structure: PyTree) -> Iterator[tuple[PyTree, float]]:
    """Lists extreme updates of weight 1, and an ordinary update with extreme weights."""

    def filled(value: float) -> PyTree:
        return jax.tree.map(lambda s: jnp.full(s.shape, value).astype(s.dtype), structure)

    for value in (*_VALUES, 1e-3, 1.0, 1e12):
        yield filled(value), 1.0
    for weight in (0.0, 1e20, 1e30, -1e30, np.nan, np.inf):
        yield filled(1.0), weight


class Worst(NamedTuple):
    """The result of a search."""

    ratio: float  # The largest distance over its bound; inf where a sum was not finite.
    tried: int  # The number of records or updates.
    family: str  # The construction of the worst.


def search_sums(
    total: Callable[[PyTree, np.ndarray], PyTree],
    make_record: Callable[[np.random.Generator], tuple[dict[str, np.ndarray], str]],
    batch_size: int,
    bound: float,
    num_records: int,
    rng: np.random.Generator,
) -> Worst:
    """Searches for a record that moves a clipped sum further than its bound.

    Each record is put at a random place of a batch whose other members were made in the same way,
    so that they may absorb it, or it may absorb them. The sum is compared with that of the batch
    without it and, if it is alone, with zero. Half of the records are the worst so far with some
    entries redrawn.
    """
    checks.whole("batch_size", batch_size, at_least=2)
    checks.whole("num_records", num_records)
    worst, worst_batch, worst_place = Worst(0.0, num_records, "none"), None, 0
    for tried in range(num_records):
        place, family = int(rng.integers(batch_size)), "changed"
        if worst_batch is not None and tried % 2:
            place = worst_place
            batch = {name: array.copy() for name, array in worst_batch.items()}
            fresh, family = make_record(rng)
            for name, array in batch.items():
                member = int(rng.integers(batch_size))
                keep = rng.random(array[member].shape) < 0.7
                array[member] = np.where(keep, array[member], fresh[name])
        else:
            records = [make_record(rng) for _ in range(batch_size)]
            family = records[place][1]
            if rng.random() < 0.3:
                records = [records[place]] * batch_size
            batch = {name: np.stack([r[name] for r, _ in records]) for name in records[0][0]}
        all_real, alone = np.ones(batch_size, bool), np.arange(batch_size) == place
        by_itself = total(batch, alone)
        moved = max(
            distance(total(batch, all_real), total(batch, ~alone)),
            distance(by_itself, jax.tree.map(jnp.zeros_like, by_itself)),
        )
        ratio = moved / bound
        if ratio > worst.ratio:
            worst, worst_batch, worst_place = Worst(ratio, num_records, family), batch, place
    return worst


def hostile(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[np.ndarray, str]:
    """Draws float32 arrays on which arithmetic fails, and names their family."""
    families: Mapping[str, Callable[..., np.ndarray]] = {
        "ordinary": _ordinary,
        "exponents": _exponents,
        "two scales": _two_scales,
        "cancelling rows": _cancelling_rows,
        "repeated rows": _repeated_rows,
        "one entry": _one_entry,
        "not finite": _not_finite,
    }
    chances = np.array([2, 2, 2, 4, 1, 2, 0.2])
    name = str(rng.choice(list(families), p=chances / chances.sum()))
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(families[name](shape, rng), np.float64).astype(np.float32), name


def hostile_records(
    record: Mapping[str, np.ndarray],
) -> Callable[[np.random.Generator], tuple[dict[str, np.ndarray], str]]:
    """Makes a generator of records with hostile floats; integers are the record's own or 0."""

    def make(rng):
        hostile_record, families = {}, []
        # Where one array is too small, another is large.
        balance = None
        if rng.random() < 0.4:
            balance = int(_exponent(rng) if rng.random() < 0.5 else rng.choice([-63, 63]))
        for name, array in record.items():
            array = np.asarray(array)
            if array.dtype.kind != "f":
                hostile_record[name] = array if rng.random() < 0.5 else np.zeros_like(array)
            elif balance is None:
                values, family = hostile(array.shape, rng)
                hostile_record[name] = values.astype(array.dtype)
                families.append(f"{name}: {family}")
            else:
                hostile_record[name] = _level(array.shape, balance, rng).astype(array.dtype)
                families.append(f"{name}: about 2^{balance}")
                balance = -balance
        return hostile_record, ", ".join(families)

    return make


def check_records(
    rule: GradientRule,
    params: PyTree,
    batch: Mapping[str, Any],
    config: LocalConfig,
    key: PRNGKey,
    *,
    num_records: int = 200,
) -> StepCheck:
    """Searches for a record, shaped as those of a batch, that moves a sum past 1.001 bounds."""
    if rule.bound is None:
        raise ValueError("rule must state a bound, got one that claims no privacy")
    bound = float(rule.bound(config).contribution)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist())
    arrays = {name: np.asarray(array) for name, array in flat(batch).items()}
    size = len(next(iter(arrays.values())))

    @jax.jit
    def total(batch, is_real):
        return rule.micro_batch(params, nested(batch), is_real, key, config).gradient

    def make(rng):
        index = int(rng.integers(size))
        record = {name: array[index] for name, array in arrays.items()}
        return (record, "of the batch") if rng.random() < 0.2 else hostile_records(record)(rng)

    worst = search_sums(total, make, size, bound, num_records, rng)
    name = f"sum with and without one of {num_records} records of any floats"
    return StepCheck(name, worst.ratio * bound, (1 + MARGIN) * bound)


def hostile_updates(
    structure: PyTree, num_updates: int, rng: np.random.Generator
) -> Iterator[tuple[PyTree, float]]:
    """Draws updates of hostile floats, with weights."""
    leaves, treedef = jax.tree.flatten(structure)
    for i in range(num_updates):
        scale = 2.0 ** rng.choice(_EDGES) if i % 3 == 0 else 1.0
        drawn = [hostile(leaf.shape, rng)[0] for leaf in leaves]
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            drawn = [np.asarray(x * np.float32(scale)) for x in drawn]
            weight = float(np.float32(2.0 ** rng.choice(_EDGES))) if i % 2 else 1.0
        typed = [jnp.asarray(x).astype(leaf.dtype) for x, leaf in zip(drawn, leaves, strict=True)]
        yield jax.tree.unflatten(treedef, typed), weight


def search_norms(
    clip: Callable[[PyTree], PyTree],
    norm: Callable[[np.ndarray], float],
    bound: float,
    rng: np.random.Generator,
    *,
    ranks: Iterable[int] = RANKS,
    shapes_per_rank: int = 1,
    arrays_per_shape: int = 8,
    most_entries: int = _MOST_ENTRIES,
) -> Worst:
    """Searches for an array whose clipped norm is above its bound.

    Arrays have axes of 1 to 8 and hold numbers at which a sum in one chain stops growing, or rounds
    in one direction. Several shapes are clipped in one compiled program.
    """
    side_by_side = jax.jit(lambda trees: [jax.vmap(clip)(tree) for tree in trees])
    shapes = [many_axes(r, rng, most_entries) for r in ranks for _ in range(shapes_per_rank)]
    worst, tried = Worst(0.0, 0, "none"), 0
    for first in range(0, len(shapes), _SHAPES):
        some = shapes[first : first + _SHAPES]
        batches = [[_for_norms(shape, rng) for _ in range(arrays_per_shape)] for shape in some]
        clipped = side_by_side([{"w": np.stack([a for a, _ in arrays])} for arrays in batches])
        for shape, arrays, after in zip(some, batches, clipped, strict=True):
            for (_, family), array in zip(arrays, np.asarray(after["w"]), strict=True):
                tried += 1
                ratio = norm(array.astype(np.float64)) / bound
                # NaN is above every bound.
                if not ratio <= worst.ratio:
                    name = f"{family}, {'×'.join(map(str, shape))}"
                    worst = Worst(np.inf if np.isnan(ratio) else ratio, tried, name)
    return worst._replace(tried=tried)


def check_norms(
    seed: int = 0, *, shapes_per_rank: int = 1, most_entries: int = 2**17
) -> list[StepCheck]:
    """Searches arrays of 1 to 24 axes for one that clipping leaves above its L2 or L1 bound."""
    of_norms = {
        "L2": (clip_by_global_norm, lambda a: float(np.sqrt(np.sum(np.square(a))))),
        "L1": (clip_by_l1_norm, lambda a: float(np.sum(np.abs(a)))),
    }
    results = []
    for name, (clip, norm) in of_norms.items():
        worst = search_norms(
            _clipped_at_one(clip),
            norm,
            1.0,
            np.random.default_rng([seed, 9]),
            shapes_per_rank=shapes_per_rank,
            most_entries=most_entries,
        )
        named = f"{name} norm after clipping at 1, of arrays of {RANKS[0]} to {RANKS[-1]} axes"
        results.append(StepCheck(named, worst.ratio, 1 + MARGIN))
    return results


def _clipped_at_one(clip: Callable[..., tuple[PyTree, Any]]) -> Callable[[PyTree], PyTree]:
    return lambda tree: clip(tree, 1.0)[0]


def many_axes(rank: int, rng: np.random.Generator, most_entries: int) -> tuple[int, ...]:
    """Draws a shape with axes of 1 to 8; half of the shapes have axes of one length."""
    is_alike = rng.random() < 0.5
    one, axes, size = int(rng.integers(2, LENGTHS.stop)), [], 1
    for _ in range(rank):
        length = one if is_alike else int(rng.integers(1, LENGTHS.stop))
        axes.append(length if size * length <= most_entries else 1)
        size *= axes[-1]
    if not is_alike:
        rng.shuffle(axes)
    return tuple(axes)


def _for_norms(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[np.ndarray, str]:
    """Draws numbers whose sums of squares, or of absolute values, in one chain are inaccurate."""
    kind = str(rng.choice(["one number", "one large", "any"], p=[0.4, 0.5, 0.1]))
    if kind == "one number":
        # Chains of one number round in one direction as long as the exponent of the sum is
        # unchanged.
        return np.full(shape, 1 + rng.random(), np.float32), kind
    if kind == "any":
        return hostile(shape, rng)
    # Entries a little below half a unit in the last place of a large first entry are absorbed by
    # it.
    power = rng.choice([1, 2])
    small = 2.0 ** (-(24 + rng.uniform(0.1, 2)) / power)
    values = np.full(int(np.prod(shape)), small, np.float32)
    values[0 if rng.random() < 0.5 else rng.integers(values.size)] = 1
    return values.reshape(shape), kind


def _exponent(rng: np.random.Generator, size: Any = None) -> Any:
    near = np.asarray(rng.choice(_EDGES, size=size)) + rng.integers(-2, 3, size=size)
    return np.clip(near, _SMALLEST_EXPONENT, _LARGEST_EXPONENT)


def _ordinary(shape, rng):
    return rng.normal(size=shape) * 2.0 ** int(_exponent(rng) // 8)


def _exponents(shape, rng):
    """Draws entries, each with an exponent within a range."""
    low, high = sorted(_exponent(rng, 2))
    return rng.choice([-1, 1], size=shape) * 2.0 ** rng.uniform(low, high + 1, size=shape)


def _level(shape, exponent, rng):
    """Draws entries of about one size."""
    values = rng.normal(size=shape) if rng.random() < 0.5 else np.ones(shape)
    with np.errstate(over="ignore", under="ignore"):
        return (values * 2.0 ** (exponent + int(rng.integers(-4, 5)))).astype(np.float32)


def _two_scales(shape, rng):
    """Draws entries of one size, and a few of another."""
    sizes = 2.0 ** _exponent(rng, 2).astype(float)
    picked = rng.random(shape) < rng.choice([0.02, 0.5])
    return np.where(picked, sizes[0], sizes[1]) * rng.choice([-1, 1], size=shape)


def _cancelling_rows(shape, rng):
    """Draws large rows that cancel, in some order, around small ones."""
    if len(shape) < 2 or int(np.prod(shape[:-1])) < 2:
        return _two_scales(shape, rng)
    num_rows = int(np.prod(shape[:-1]))
    row = rng.normal(size=shape[-1]) if rng.random() < 0.5 else np.ones(shape[-1])
    large = 2.0 ** int(rng.integers(0, 60))
    factors = np.zeros(num_rows)
    count = int(rng.integers(1, num_rows // 2 + 1))
    factors[:count], factors[count : 2 * count] = large, -large
    if rng.random() < 0.5:
        factors[: 2 * count] *= 2.0 ** np.repeat(rng.integers(-20, 21, count), 2)[: 2 * count]
        factors[1 : 2 * count : 2] = -factors[0 : 2 * count : 2]
    factors[2 * count :] = 2.0 ** int(_exponent(rng) // 4)
    if rng.random() < 0.7:
        rng.shuffle(factors)
    return (factors[:, None] * row).reshape(shape)


def _repeated_rows(shape, rng):
    if len(shape) < 2:
        return np.full(shape, 2.0 ** int(_exponent(rng)))
    return np.broadcast_to(_exponents(shape[-1:], rng), shape)


def _one_entry(shape, rng):
    """Draws entries that are nearly zero, and one that is not."""
    values = np.full(int(np.prod(shape)), 2.0 ** int(_exponent(rng)))
    if values.size:
        values[rng.integers(values.size)] = 2.0 ** int(_exponent(rng))
    return values.reshape(shape)


def _not_finite(shape, rng):
    values = rng.normal(size=int(np.prod(shape)))
    if values.size:
        values[rng.integers(values.size)] = rng.choice([np.nan, np.inf, -np.inf])
    return values.reshape(shape)
