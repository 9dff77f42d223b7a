"""Robust PCA against singular values of the whole in NumPy, and what memory it asks for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import later, telling
from oracles import noise_aware

from fedjax_dp import server
from fedjax_dp.privacy import calibrate_poisson
from fedjax_dp.privacy.accounting import budgets
from fedjax_dp.server.noise_aware import blocks_of

PARAMETERS, CLIENTS = 4000, 20


@functools.cache
def compiled(name, **options):
    return jax.jit(functools.partial(getattr(server, name), **options))


def estimate_noise(updates, is_real=None, **options):
    return compiled("estimate_noise", **options)(updates, is_real)


def principal_component_pursuit(matrix, **options):
    return compiled("principal_component_pursuit", **options)(matrix)


def noisy_updates(seed=0, signal_scale=1.0):
    """A common direction and noise of its own for each client, `[clients, parameters]`."""
    rng = np.random.default_rng(seed)
    variance = np.exp(rng.uniform(np.log(0.05), np.log(50), CLIENTS))
    signal = signal_scale * rng.normal(size=PARAMETERS)
    noise = rng.normal(size=(PARAMETERS, CLIENTS)) * np.sqrt(variance)
    return (signal[:, None] + noise).T.astype(np.float32), variance


def aggregated(weights, variance):
    return float(np.sum(weights**2 * variance))


@pytest.mark.parametrize("mode", later(["fixed", "inexact"], but=["inexact"], mark=telling))
def test_noise_of_a_rank_one_signal_is_found(mode):
    """Computed elsewhere: correlation of logarithms 0.999, and nearly the least variance."""
    updates, variance = noisy_updates()
    found = estimate_noise(jnp.asarray(updates), mode=mode, max_iterations=1000)
    levels = np.asarray(found.noise_levels, float)
    assert np.corrcoef(np.log(levels), np.log(variance))[0, 1] >= 0.999
    oracle = aggregated(noise_aware.inverse(variance), variance)
    uniform = aggregated(np.full(CLIENTS, 1 / CLIENTS), variance)
    norms = aggregated(noise_aware.inverse(np.sum(updates.astype(float) ** 2, axis=1)), variance)
    ours = aggregated(noise_aware.inverse(levels), variance)
    assert oracle == pytest.approx(0.0120, abs=1e-4) and uniform == pytest.approx(0.386, abs=1e-3)
    assert ours == pytest.approx(0.0121, abs=1e-4)
    assert ours < 1.02 * oracle < norms < uniform


def test_weights_by_the_norms_of_updates_depend_on_the_signal():
    """A computation elsewhere gave 0.0172 for 1/‖M_i‖², for a signal of unknown scale.

    Of unit signals the expected norms (1 + s²)p give 0.033; a signal of half that size would give
    that figure. Robust PCA does as well under both.
    """
    found = {}
    for scale in (1.0, 0.5):
        updates, variance = noisy_updates(signal_scale=scale)
        norms = aggregated(noise_aware.inverse(np.sum(updates.astype(float) ** 2, 1)), variance)
        closed_form = aggregated(noise_aware.inverse(scale**2 + variance), variance)
        assert norms == pytest.approx(closed_form, rel=0.03)
        levels = np.asarray(estimate_noise(jnp.asarray(updates)).noise_levels, float)
        assert aggregated(noise_aware.inverse(levels), variance) == pytest.approx(0.0121, abs=1e-4)
        found[scale] = norms
    assert abs(found[1.0] / 0.0172 - 1) > 0.5
    assert found[0.5] == pytest.approx(0.0172, rel=0.03)


def test_scale_of_the_updates_does_not_matter():
    updates, _ = noisy_updates()
    weights = [
        noise_aware.inverse(np.asarray(estimate_noise(s * jnp.asarray(updates)).noise_levels))
        for s in (1.0, 1e-3, 1e-12, 1e12)
    ]
    for scaled in weights[1:]:
        np.testing.assert_allclose(scaled, weights[0], rtol=0.01)


def low_rank_and_sparse(size=200, rank=5, share=0.05):
    rng = np.random.default_rng(1)
    low_rank = rng.normal(size=(size, rank)) @ rng.normal(size=(rank, size))
    is_hit = rng.uniform(size=(size, size)) < share
    return low_rank, np.where(is_hit, 10 * rng.choice([-1.0, 1.0], size=(size, size)), 0.0)


@telling
@pytest.mark.parametrize("mode, most", [("fixed", 40), ("inexact", 25)])
def test_low_rank_and_sparse_parts_are_recovered(mode, most):
    """Computed elsewhere in float64: errors of 1.4e-7 and 7e-8 after 23 iterations."""
    low_rank, sparse = low_rank_and_sparse()
    with jax.enable_x64(True):
        found = principal_component_pursuit(
            jnp.asarray(low_rank + sparse, "float64"), mode=mode, tolerance=1e-7
        )
    assert found.num_iterations <= most and found.rank == 5 and found.residual <= 1e-7
    error = [
        np.linalg.norm(np.asarray(ours) - true) / np.linalg.norm(true)
        for ours, true in ((found.low_rank, low_rank), (found.sparse, sparse))
    ]
    assert error[0] < 3e-7 and error[1] < 2e-7
    # In float32 what is lost is rounding.
    found = principal_component_pursuit(jnp.float32(low_rank + sparse), mode=mode)
    assert found.rank == 5 and found.residual <= 1e-6
    for ours, true in ((found.low_rank, low_rank), (found.sparse, sparse)):
        assert np.linalg.norm(ours - true) < 1e-5 * np.linalg.norm(true)


@telling
@pytest.mark.parametrize("mode", ["fixed", "inexact"])
@pytest.mark.parametrize("shape", [(6, 50), (30, 8)])
def test_iterations_agree_with_full_singular_values(mode, shape):
    """After as many iterations both parts are the same: tall, wide and square."""
    matrix = np.random.default_rng(2).standard_t(3, size=shape)
    for iterations in (7, 40):
        numbers = {"mode": mode, "max_iterations": iterations}
        found = principal_component_pursuit(jnp.float32(matrix), tolerance=1e-12, **numbers)
        low_rank, sparse = noise_aware.pursuit(matrix.T, tolerance=0.0, **numbers)
        assert found.num_iterations == iterations
        np.testing.assert_allclose(found.low_rank, low_rank.T, atol=2e-5)
        np.testing.assert_allclose(found.sparse, sparse.T, atol=2e-5)


@telling
def test_empty_slots_count_for_nothing():
    updates, _ = noisy_updates()
    is_real = np.ones(CLIENTS, bool)
    is_real[[3, 7, 19]] = False
    garbage = np.where(is_real[:, None], updates, 1e6)
    expected = estimate_noise(jnp.asarray(updates[is_real]))
    found = estimate_noise(jnp.asarray(garbage), jnp.asarray(is_real))
    np.testing.assert_allclose(found.noise_levels[is_real], expected.noise_levels, rtol=1e-3)
    assert np.all(np.asarray(found.noise_levels)[~is_real] == 0)


def test_clients_in_another_order_have_the_same_levels():
    updates, _ = noisy_updates()
    order = np.random.default_rng(3).permutation(CLIENTS)
    straight = estimate_noise(jnp.asarray(updates)).noise_levels
    turned = estimate_noise(jnp.asarray(updates[order])).noise_levels
    np.testing.assert_allclose(turned, np.asarray(straight)[order], rtol=1e-3)


@telling
def test_empty_input_has_zeros():
    found = principal_component_pursuit(jnp.zeros((3, 5)))
    assert found.num_iterations == 0 and found.residual == 0
    assert not np.any(found.low_rank) and not np.any(found.sparse)
    found = estimate_noise({"w": jnp.ones((3, 5))}, jnp.zeros(3, bool))
    assert not np.any(found.noise_levels)


@telling
def test_blocks_read_neighbouring_parameters_across_leaves():
    """Three blocks of 4 in 13 parameters; the last parameter is in none but the tail."""
    rng = np.random.default_rng(4)
    tree = {
        "a": rng.normal(size=(5, 2, 3)),
        "b": rng.normal(size=(5,)),
        "c": rng.normal(size=(5, 6)),
    }
    tree = jax.tree.map(jnp.float32, tree)
    flat = np.concatenate([np.asarray(x).reshape(5, -1) for x in jax.tree.leaves(tree)], axis=1)
    parts = []
    for i in (0, 4, 8, 9):
        block = flat[:, i : i + 4].astype(np.float64).T
        _, sparse = noise_aware.pursuit(block, mode="inexact", tolerance=1e-6)
        parts.append(np.sum(sparse**2, axis=0))
    for count, options in (
        (3, {}),
        (2, {"num_blocks": 2}),
        (1, {"num_blocks": 1}),
        (4, {"reads_tail": True}),
    ):
        found = estimate_noise(tree, block_size=4, **options)
        expected = np.sum(parts[:count], axis=0) * 13 / (4 * count)
        np.testing.assert_allclose(found.noise_levels, expected, rtol=1e-3)


@pytest.mark.parametrize(
    ("num_parameters", "width", "starts"),
    [(10, 4, [0, 4, 6]), (8, 4, [0, 4]), (5, 3, [0, 2]), (3, 7, [0])],
)
def test_the_tail_is_one_more_block_where_blocks_leave_a_rest(num_parameters, width, starts):
    found = blocks_of(num_parameters, width, None, reads_tail=True)
    assert found == (min(width, num_parameters), starts)


@telling
def test_more_parameters_lower_the_error():
    """Precision grows with p', as in the paper's figure 3.7."""
    updates, variance = noisy_updates()
    optimum = noise_aware.inverse(variance)
    errors = []
    for width in (100, 400, 4000):
        levels = estimate_noise(jnp.asarray(updates), block_size=width, num_blocks=1).noise_levels
        errors.append(np.abs(noise_aware.inverse(np.asarray(levels, float)) - optimum).sum())
    assert errors[0] > errors[1] > errors[2] and errors[2] < 0.1


@telling
def test_memory_of_eleven_million_parameters_and_sixty_clients():
    """Compiled and not run: the updates, and little beside them; 8 GiB are enough."""
    leaves = {
        f"layer{i}": jax.ShapeDtypeStruct((60, 512, 512, 3, 3), jnp.float32) for i in range(4)
    }
    leaves["rest"] = jax.ShapeDtypeStruct((60, 11_181_642 - 4 * 512 * 512 * 9), jnp.float32)
    program = jax.jit(server.estimate_noise).lower(leaves).compile()
    memory = program.memory_analysis()
    assert memory.argument_size_in_bytes == 60 * 11_181_642 * 4
    assert memory.temp_size_in_bytes < 10 * 60 * 200_000 * 4
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < 3 * 2**30


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tolerance": 0.0}, "tolerance must be above 0"),
        ({"max_iterations": 0}, "max_iterations must be an integer of at least 1"),
        ({"block_size": 4, "num_blocks": 3}, "num_blocks must be at most 2"),
        ({"num_blocks": 0}, "num_blocks must be an integer of at least 1"),
        (
            {"block_size": 4, "num_blocks": 2, "reads_tail": True},
            "num_blocks must be None if reads_tail is set",
        ),
    ],
)
def test_bad_choices_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        estimate_noise(jnp.ones((2, 9)), **options)


def test_weights_of_published_noise_are_those_of_the_oracle():
    """Noise of Dist2 on 28,938 parameters, over variances of 1 to 3,000, and a common direction."""
    epsilon, batch = budgets.published_budgets("Dist2", 20), budgets.published_batch_sizes(20)
    z = calibrate_poisson(
        epsilon, 1e-4, batch / 2400, 200 * 2400 / batch, accountant="rdp-classic-64"
    )
    variance = np.ceil(2400 / batch) * 0.001**2 * 28_938 * (3 * z / batch) ** 2
    rng = np.random.default_rng(0)
    direction = rng.normal(size=28_938) / np.sqrt(28_938)
    # Steps of a mean gradient of norm one; each client moves as far as it has steps.
    updates = 0.001 * np.ceil(2400 / batch)[:, None] * direction
    updates += rng.normal(size=updates.shape) * np.sqrt(variance / 28_938)[:, None]
    levels = estimate_noise(jnp.float32(updates)).noise_levels
    weights = noise_aware.inverse(np.asarray(levels, float))
    least = 1 / np.sum(1 / variance)
    np.testing.assert_allclose(weights, least / variance, rtol=0.1)
    assert np.sum(weights**2 * variance) < 1.01 * least
