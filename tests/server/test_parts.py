"""Updates of several parts under one private mean: bounds, noise and refusals, by NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aggregating import closed, sent_by
from marks import floats, telling
from small_problem import COHORT, NUM_CLIENTS, make_model, plain_trainer

from fedjax_dp import algorithms
from fedjax_dp.privacy.mechanisms.clipping import make_adaptive_clipping
from fedjax_dp.privacy.mechanisms.distributed import make_central_plan
from fedjax_dp.server import (
    adaptive_gaussian_mean,
    by_parts,
    by_realised_count,
    central_discrete_mean,
    gaussian_mean,
    gradient_mask,
    laplace_mean,
    uniform_mean,
)

pytestmark = floats

CLIP_NORM, DIVISOR = 0.5, 4.0
SHARES = {"a": 0.6, "b": 0.8}
SCALES = {"a": 0.1, "b": 3.0}


def update_of(a, b):
    """Two parts, the second of two layers."""
    b = np.asarray(b)
    return jax.tree.map(jnp.float32, {"a": a, "b": {"w": b[:-1], "z": b[-1:]}})


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]).astype(np.float64)


def contribution_of(mean, update):
    """What a client adds, and what the server makes of it alone."""
    state = mean.init(update)
    sent = mean.contribute(state, mean.numbers, update, sent_by(weight=7))
    _, aggregate, info = mean.combine(state, mean.numbers, sent, closed())
    return sent, aggregate, info


def clipped(vector, bound):
    return vector * min(1.0, bound / np.linalg.norm(vector))


@functools.cache
def without_noise(how):
    """Compiles what an update of two parts makes of such a mean, for updates of any size."""
    options = {"scales": {"scales": SCALES}, "shares": {"shares": SHARES}}[how]
    mean = by_parts(gaussian_mean(CLIP_NORM, 0.0, DIVISOR), **options)
    return jax.jit(functools.partial(contribution_of, mean))


DRAWN = np.random.default_rng(0).normal(size=(2, 5))


@pytest.mark.parametrize("size", [1e-2, 1.0, 1e4])
def test_scales_weigh_parts_within_one_bound(size):
    a, b = size * DRAWN
    _, aggregate, _ = without_noise("scales")(update_of(a, b))
    factors = np.repeat([SCALES["a"], SCALES["b"]], 5)
    expected = clipped(factors * np.concatenate([a, b]), CLIP_NORM) / factors / DIVISOR
    np.testing.assert_allclose(flat(aggregate), expected, rtol=1e-5)


@pytest.mark.parametrize("sizes", [(1e-2, 1e-2), (1e4, 1e-2), (1e-2, 1e4), (1e4, 1e4)])
def test_shares_clip_each_part_by_itself(sizes):
    a, b = np.asarray(sizes)[:, None] * DRAWN
    _, aggregate, info = without_noise("shares")(update_of(a, b))
    parts = [clipped(a, SHARES["a"] * CLIP_NORM), clipped(b, SHARES["b"] * CLIP_NORM)]
    np.testing.assert_allclose(flat(aggregate), np.concatenate(parts) / DIVISOR, rtol=1e-5)
    assert info["num_clipped"] == (max(sizes) > 1)


@pytest.mark.parametrize("how", ["scales", "shares"])
@pytest.mark.parametrize(
    "value", [np.nan, np.inf, -np.inf, 3e38, 1e30, 1e-30, 1e-44, 0.0], ids=lambda v: f"{v:g}"
)
def test_no_floats_of_a_part_take_more_than_the_bound(how, value):
    """Values that overflow in a scale, in a square or in the sum of squares, or that vanish."""
    for a, b in ((value, 1.0), (1.0, value), (value, value)):
        sent, aggregate, _ = without_noise(how)(update_of(np.full(5, a), np.full(5, b)))
        norm = np.linalg.norm(flat(sent)[:10])
        assert np.isfinite(flat(aggregate)).all() and norm <= CLIP_NORM * (1 + 1e-6)
        if not np.isfinite(value):
            assert norm == 0


@pytest.mark.parametrize(
    ("how", "factors"), [({"scales": SCALES}, SCALES), ({"shares": SHARES}, {})]
)
def test_noise_is_that_of_the_bound_divided_by_the_scale(how, factors):
    size, multiplier = 40_000, 1.5
    mean = by_parts(gaussian_mean(CLIP_NORM, multiplier, DIVISOR), **how)
    zeros = {"a": jnp.zeros(size), "b": jnp.zeros(size)}
    _, aggregate, info = jax.jit(functools.partial(contribution_of, mean))(zeros)
    stddev = multiplier * CLIP_NORM / DIVISOR
    for part in zeros:
        expected = stddev / factors.get(part, 1.0)
        # Five standard errors.
        assert np.std(aggregate[part]) == pytest.approx(expected, rel=5 / np.sqrt(2 * size))
    drawn = [np.square(np.float64(aggregate[part])).mean() for part in zeros]
    # What the log has, and what an audit compares with all entries.
    assert info["noise_stddev"] == pytest.approx(np.sqrt(np.mean(drawn)), rel=0.02)
    # The same bound and the same event, whatever a part is multiplied by.
    assert mean.claim.sensitivity((), mean.numbers).l2 == CLIP_NORM
    assert mean.claim.event(mean.numbers).noise_multiplier == pytest.approx(multiplier)
    assert not mean.claim.clips_whole


_TOLERANCE = 1e-4


@telling
@pytest.mark.parametrize("name", ["per_layer", "laplace", "central_discrete", "adaptive"])
def test_scales_go_with_any_mean(name):
    update, structure = update_of(*DRAWN), update_of(*DRAWN)
    rule = make_adaptive_clipping(DIVISOR, initial_clip_norm=CLIP_NORM, count_stddev=1e6)
    mean = {
        "per_layer": lambda: gaussian_mean(CLIP_NORM, 0.0, DIVISOR, per_layer=True),
        "laplace": lambda: laplace_mean(CLIP_NORM, 0.0, DIVISOR),
        "central_discrete": lambda: central_discrete_mean(
            structure, CLIP_NORM, 0.0, DIVISOR, tolerance=_TOLERANCE
        ),
        "adaptive": lambda: adaptive_gaussian_mean(rule, 1e-9),
    }[name]()
    scaled = by_parts(mean, scales=SCALES)
    state, key = scaled.init(structure), sent_by()
    contribution = scaled.contribute(state, scaled.numbers, update, key)
    if scaled.encode is not None:
        contribution = scaled.encode(state, scaled.numbers, contribution, key)
    _, aggregate, _ = scaled.combine(state, scaled.numbers, contribution, closed())
    a, b = (SCALES[part] * DRAWN[i] for i, part in enumerate(SCALES))
    whole = np.concatenate([a, b])
    if name == "per_layer":
        bound = CLIP_NORM / np.sqrt(3)
        bounded = np.concatenate([clipped(layer, bound) for layer in (a, b[:-1], b[-1:])])
    elif name == "laplace":
        bounded = whole * min(1.0, CLIP_NORM / np.abs(whole).sum())
    else:
        bounded = clipped(whole, CLIP_NORM)
    factors, rounding = np.repeat(list(SCALES.values()), 5), 1e-6
    if name == "central_discrete":
        # Each entry is rounded to one of its two neighbours on the lattice.
        rounding = make_central_plan(10, CLIP_NORM, 0.0, tolerance=_TOLERANCE).granularity
    error = np.abs(flat(aggregate) - bounded / factors / DIVISOR) * factors * DIVISOR
    assert np.all(error <= 1.01 * rounding)


def _plain():
    return gaussian_mean(CLIP_NORM, 1.0, DIVISOR)


@pytest.mark.parametrize(
    ("build", "rule"),
    [
        (lambda: by_parts(_plain()), "scales must be given, or shares, and not both"),
        (lambda: by_parts(_plain(), scales=SCALES, shares=SHARES), "scales must be given, or sha"),
        (lambda: by_parts(_plain(), scales={"a": 0.0}), r"scales.* above 0"),
        (lambda: by_parts(_plain(), shares={"a": 1.1}), r"shares.* \(0, 1\]"),
        (lambda: by_parts(_plain(), shares={"a": 0.5, "b": 0.5}), "squares that add up to 1"),
        (
            lambda: by_parts(gaussian_mean(0.5, 1.0, 4.0, per_layer=True), shares=SHARES),
            "shares must be left out for a mean that does not clip whole updates in L2 norm",
        ),
        (lambda: by_parts(laplace_mean(0.5, 1.0, 4.0), shares=SHARES), "shares must be left out"),
        (
            lambda: by_parts(
                adaptive_gaussian_mean(make_adaptive_clipping(4.0, count_stddev=4.0), 1.0),
                shares=SHARES,
            ),
            "to a fixed bound",
        ),
        (lambda: by_parts(uniform_mean(), scales=SCALES), "mean must bound updates and add noise"),
        (lambda: gradient_mask(by_parts(_plain(), scales=SCALES)), "must leave updates whole"),
    ],
)
def test_bounds_of_parts_that_would_not_hold_are_refused(build, rule):
    with pytest.raises(ValueError, match=rule):
        build()


@pytest.mark.parametrize(
    ("how", "update", "rule"),
    [
        ({"scales": {"c": 1.0}}, update_of(*DRAWN), "scales must name parts of an update: a, b"),
        ({"shares": {"a": 1.0}}, update_of(*DRAWN), "shares must name every part of an update"),
        ({"scales": SCALES}, jnp.ones(3), "scales must be left out for an update of one part"),
    ],
)
def test_parts_that_an_update_does_not_have_are_refused(how, update, rule):
    with pytest.raises(ValueError, match=rule):
        contribution_of(by_parts(_plain(), **how), update)


OWN = {
    "feddyn": {},
    "mr_mtl": {},
    "o_dpcfl": {"clusters": (0, 1, 0, 1, 0, 1)},
    "ifca": {"num_models": 2, "is_weighted": False},
    "fedpi": {},
}


def built(name, mean, **options):
    model, factory = make_model(), getattr(algorithms, name)
    argument = "aggregator" if name == "scaffold" else "private_mean"
    if name not in ("ifca", "fedpi"):
        options["num_clients"] = NUM_CLIENTS
    return factory(model, plain_trainer(model), **{argument: mean}, **OWN.get(name, {}) | options)


@pytest.mark.parametrize("name", [*OWN, "scaffold"])
def test_a_mean_without_a_public_divisor_is_refused(name):
    realised = by_realised_count(gaussian_mean(0.2, 0.8, COHORT))
    means = (realised,) if name == "scaffold" else (realised, uniform_mean())
    for mean in means:
        with pytest.raises(ValueError, match="must be a private mean that divides by a public n"):
            built(name, mean)


@pytest.mark.parametrize(
    ("name", "options", "rule"),
    [
        ("ifca", {"is_weighted": True}, "is_weighted must be False with an aggregator"),
        ("o_dpcfl", {"is_weighted": True}, "is_weighted must be False with an aggregator"),
        ("fedpi", {"is_weighted": True}, "is_weighted must be False with an aggregator"),
        ("scaffold", {"is_weighted": True}, "is_weighted must be False with an aggregator"),
        ("fedpi", {"form": "centralised"}, "form must be 'decentralised' if clients are protec"),
    ],
)
def test_options_that_no_private_mean_has_a_place_for_are_refused(name, options, rule):
    with pytest.raises(ValueError, match=rule):
        built(name, gaussian_mean(0.2, 0.8, COHORT), **options)


def test_votes_on_control_variates_are_refused():
    with pytest.raises(ValueError, match="aggregator must be unmasked if clients are protected"):
        built("scaffold", gradient_mask(gaussian_mean(0.2, 0.8, COHORT)))
