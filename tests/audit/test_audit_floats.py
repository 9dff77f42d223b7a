"""The audit's search for floats finds what it is there for, and nothing where nothing is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import floats, slow, telling

from fedjax_dp.audit.floats import (
    LENGTHS,
    MARGIN,
    RANKS,
    check_norms,
    check_records,
    hostile,
    hostile_updates,
    many_axes,
)
from fedjax_dp.clients import LocalConfig
from fedjax_dp.clients.gradients import clipped
from fedjax_dp.core import trees
from fedjax_dp.models import Model, outer_products, registry

pytestmark = floats

_CONFIG = LocalConfig(clip_norm=1.0, noise_multiplier=0.0, batch_size=1)


def _regression():
    model = registry.build("linear_regression", {"x": jax.ShapeDtypeStruct((900,), "float32")}, 1)
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(4, 900)), "y": rng.normal(size=4)}
    return model, {name: array.astype(np.float32) for name, array in batch.items()}


def _many_rows():
    """A dense layer over 24 places, whose rows are summed by factors."""
    model = Model.from_functions(
        init=lambda key: {"w": jnp.zeros((300, 200))},
        apply=lambda p, x: x @ p["w"],
        loss=lambda outputs, batch: jnp.sum(outputs * batch["y"], (1, 2)),
    )
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(4, 24, 300)), "y": rng.normal(size=(4, 24, 200))}
    return model, {name: array.astype(np.float32) for name, array in batch.items()}


def _check(case):
    model, batch = case()
    params = model.init(jax.random.key(0))
    # By layer, since the gradient of a bias would outweigh what hides at the other parameters.
    rule = clipped(model, per_layer=True)
    return check_records(rule, params, batch, _CONFIG, jax.random.key(1))


@pytest.mark.parametrize("case", [_regression, _many_rows])
def test_nothing_is_found_as_the_package_stands(case):
    check = _check(case)
    assert 0.5 < check.measured <= check.allowed == 1 + MARGIN


def test_squares_that_vanish_unnoticed_are_found(monkeypatch):
    monkeypatch.setattr(outer_products, "unseen", lambda size: 0.0)
    assert _check(_regression).is_violated


def test_norms_of_rows_that_may_cancel_are_found(monkeypatch):
    def as_they_come(rows, columns):
        """Reads norms off the Gram matrices of the rows themselves, whose differences cancel."""
        rows, row_norms = outer_products._normalized(rows)
        columns, column_norms = outer_products._normalized(columns)
        grams = outer_products._gram(rows) * outer_products._gram(columns)
        squares = jnp.maximum(jnp.sum(grams, (1, 2)), 0)
        norms = jnp.sqrt(squares) + outer_products.unseen(rows.shape[1])
        scale = row_norms * column_norms
        return outer_products.Factors(rows, columns, scale, scale * norms)

    monkeypatch.setattr(outer_products, "factors", as_they_come)
    assert _check(_many_rows).measured > 1.1


def _of_all_axes(tree):
    """Sums over all axes at once, which the CPU compiler does in one chain."""
    return sum(jnp.sum(x) for x in jax.tree.leaves(tree))


@slow
def test_no_norm_of_any_rank_is_above_its_bound():
    """More and larger arrays than an audit tries; the largest ratios are printed."""
    results = check_norms(1, shapes_per_rank=4, most_entries=2**22)
    for check in results:
        print(f"{check.name}: {check.measured:.7f} at most")
        assert 1 - 1e-6 < check.measured <= check.allowed == 1 + MARGIN


@telling
def test_norms_that_are_summed_in_one_chain_are_found(monkeypatch):
    assert not any(check.is_violated for check in check_norms(0, most_entries=2**14))
    monkeypatch.setattr(trees, "total", _of_all_axes)
    monkeypatch.setattr(trees, "_flat", lambda tree: tree)
    assert all(check.is_violated for check in check_norms())


def test_shapes_of_norms_are_of_every_rank_and_fit():
    rng = np.random.default_rng(0)
    for rank in RANKS:
        shapes = [many_axes(rank, rng, 2**17) for _ in range(40)]
        assert all(len(shape) == rank and set(shape) <= set(LENGTHS) for shape in shapes)
        assert all(np.prod(shape) <= 2**17 for shape in shapes)
    assert max(np.prod(shape) for shape in shapes) > 2**15
    assert {length for shape in shapes for length in shape} == set(LENGTHS)


def test_a_rule_without_a_bound_is_refused():
    model, batch = _regression()
    rule = clipped(model)._replace(bound=None)
    with pytest.raises(ValueError, match="must state a bound"):
        check_records(rule, model.init(jax.random.key(0)), batch, _CONFIG, jax.random.key(1))


def test_hostile_floats_are_of_every_kind():
    rng = np.random.default_rng(0)
    made = [hostile((6, 5), rng) for _ in range(300)]
    values = np.stack([array for array, _ in made])
    assert values.dtype == np.float32 and len({family for _, family in made}) == 7
    sizes = np.abs(values[np.isfinite(values)])
    assert sizes.max() > 2.0**120 and 0 < sizes[sizes > 0].min() < 2.0**-126
    assert not np.isfinite(values).all()


def test_hostile_updates_have_the_structure_and_types_that_are_asked_for():
    structure = {
        "w": jax.ShapeDtypeStruct((3, 4), jnp.float32),
        "b": jax.ShapeDtypeStruct((4,), jnp.bfloat16),
    }
    for update, weight in hostile_updates(structure, 20, np.random.default_rng(0)):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), update) == jax.tree.map(
            lambda s: (s.shape, jnp.dtype(s.dtype)), structure
        )
        assert weight > 0
