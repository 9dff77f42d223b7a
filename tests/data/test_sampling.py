"""Samplers: distributions that reject a wrong rate, exact counts, and the events they stand for."""

import functools
from fractions import Fraction
from itertools import chain

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import later, telling
from scipy import stats

from fedjax_dp.data import sampling, sparse

NUM_DRAWS = 20_000
# The chance of a false alarm in each test below.
RARE = 1e-5
# Each once, so that tests share what is compiled for it.
SAMPLERS = {
    "poisson": sampling.poisson(),
    "truncated": sampling.poisson(capacity=3),
    "fixed_size": sampling.fixed_size(),
    "full_participation": sampling.full_participation(),
    "cyclic": sampling.cyclic(),
    "shuffled": sampling.shuffled(),
    "shuffled_whole": sampling.shuffled(only_whole=True),
}
OF_FOUR = sampling.poisson(capacity=4)


@functools.cache
def membership_of(sampler, limit, capacity):
    """Compiles one draw for each of many keys, for all sizes of populations and batches."""

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None, None))
    def draw(key, size, batch_size):
        drawn = sampler.draw(sampler.init(limit), key, 0, size, batch_size, limit, capacity)[1]
        target = jnp.where(drawn.is_real, drawn.indices, limit)
        count = jnp.zeros(limit, jnp.int32).at[target].add(1, mode="drop")
        return count, drawn.overflow, jnp.sum(drawn.is_real)

    return draw


@functools.cache
def memberships(sampler, size, batch_size, limit, num_draws=NUM_DRAWS, seed=0):
    """Draws once for each of many keys: who is in, `[draws, limit]`, and what found no slot."""
    draw = membership_of(sampler, limit, sampler.capacity(limit, int(np.ceil(batch_size))))
    keys = jax.random.split(jax.random.key(seed), num_draws)
    counts, overflow, filled = draw(keys, jnp.int32(size), jnp.asarray(batch_size))
    counts = np.asarray(counts)
    assert counts.max() <= 1, "no member is drawn twice"
    np.testing.assert_array_equal(counts.sum(axis=1), filled)
    return counts.astype(bool), np.asarray(overflow)


def p_of_inclusion(members, rate):
    """Chi-square of how often each member is in, against independent draws at `rate`."""
    n, size = members.shape
    z = (members.sum(axis=0) - n * rate) / np.sqrt(n * rate * (1 - rate))
    return stats.chi2.sf(np.sum(z**2), size)


@pytest.mark.parametrize("size, batch_size", [(30, 6.0), (30, 1.5), (7, 6.5)])
def test_poisson_draws_each_member_at_the_rate(size, batch_size):
    members, overflow = memberships(SAMPLERS["poisson"], size, batch_size, 32)
    assert not members[:, size:].any() and not overflow.any()
    members, rate = members[:, :size], batch_size / size
    assert RARE < p_of_inclusion(members, rate) < 1 - RARE
    for wrong in (0.93 * rate, 1.07 * rate):
        assert p_of_inclusion(members, min(wrong, 0.999)) < RARE


def test_poisson_counts_are_binomial():
    size, rate = 30, 0.2
    counts = memberships(SAMPLERS["poisson"], 30, 6.0, 32)[0].sum(axis=1)

    def p_value(rate):
        values = np.arange(2, 11)
        probabilities = stats.binom.pmf(values, size, rate)
        observed = [np.sum(counts == v) for v in values]
        observed += [np.sum(counts < 2), np.sum(counts > 10)]
        tails = [stats.binom.cdf(1, size, rate), stats.binom.sf(10, size, rate)]
        expected = np.array([*probabilities, *tails]) * len(counts)
        return stats.chisquare(observed, expected * len(counts) / expected.sum()).pvalue

    assert p_value(rate) > RARE
    assert p_value(1.04 * rate) < RARE
    variance = counts.var(ddof=1) / (size * rate * (1 - rate))
    # A fixed number of members would have no variance, a shared coin much more.
    assert abs(variance - 1) < 5 * np.sqrt(2 / len(counts))


def test_poisson_members_are_independent_of_one_another_and_of_the_last_step():
    members = memberships(SAMPLERS["poisson"], 30, 6.0, 32)[0][:, :30].astype(float)
    correlation = np.corrcoef(members.T)
    pairs = correlation[np.triu_indices(30, 1)]
    assert np.abs(pairs).max() < stats.norm.isf(RARE / len(pairs)) / np.sqrt(NUM_DRAWS)
    # The sum over pairs shows a weak common cause that no pair shows alone.
    assert stats.chi2.sf(NUM_DRAWS * np.sum(pairs**2), len(pairs)) > RARE

    sampler, key = sampling.poisson(), jax.random.key(0)
    steps = jax.jit(jax.vmap(lambda t: sampler.draw((), key, t, 30, 6, 30, 30)[1].is_real.sum()))(
        jnp.arange(NUM_DRAWS)
    )
    steps = np.asarray(steps, float)
    assert abs(np.corrcoef(steps[1:], steps[:-1])[0, 1]) < 5 / np.sqrt(NUM_DRAWS)


@pytest.mark.parametrize("capacity", [None, 1])
def test_the_rate_drawn_never_exceeds_the_rate_accounted(capacity, monkeypatch):
    """Random bits at the accounted rate are outside the draw; a millionth below it, inside."""
    rng = np.random.default_rng(0)
    sizes = np.concatenate([rng.integers(1, 2_000_000, 2000), np.arange(1, 200)])
    batches = np.concatenate([rng.uniform(1, 1000, 1000), rng.integers(1, 1000, 1199)])
    keep = batches / sizes < 0.99
    sizes, batches = sizes[keep], batches[keep]
    sampler = sampling.poisson(capacity)

    def rate_of(size, batch):
        base = dp_accounting.GaussianDpEvent(1.0)
        return Fraction(sampler.event(base, size, batch).sampling_probability)

    edges = [rate_of(int(s), float(b)) * 2**32 for s, b in zip(sizes, batches, strict=True)]
    outside = np.array([-(-e.numerator // e.denominator) for e in edges], np.uint32)
    inside = np.array([int(e * (1 - Fraction(1, 10**6))) - 2 for e in edges], np.int64)

    def num_drawn(bits):
        def draw(size, batch, bits):
            monkeypatch.setattr(jax.random, "bits", lambda *_: bits[None])
            return sampler.draw((), jax.random.key(0), 0, size, batch, 1, 1)[1].is_real.sum()

        drawn = jax.jit(jax.vmap(draw))(sizes.astype(np.int32), np.float32(batches), bits)
        return np.asarray(drawn)

    # Half of the batch sizes have no exact float32: their rounding is within the margin, too.
    assert not num_drawn(outside).any()
    assert num_drawn(np.maximum(inside, 0).astype(np.uint32))[inside > 0].all()


@pytest.mark.parametrize("batch_size", [10, 11, 10 - 1e-7, np.float32(10)])
def test_a_rate_of_one_draws_all_clients_and_is_accounted_so(batch_size):
    sampler, base = SAMPLERS["poisson"], dp_accounting.GaussianDpEvent(1.0)
    assert memberships(sampler, 10, float(batch_size), 12, 100)[0].sum() == 10 * 100
    assert sampler.event(base, 10, float(batch_size)) == base


def test_truncation_returns_a_part_of_the_exact_draw_and_counts_the_rest():
    exact, _ = memberships(SAMPLERS["poisson"], 20, 5, 20)
    cut, overflow = memberships(OF_FOUR, 20, 5, 20)
    counts = exact.sum(axis=1)
    assert not np.any(cut & ~exact)
    np.testing.assert_array_equal(cut.sum(axis=1), np.minimum(counts, 4))
    np.testing.assert_array_equal(overflow, np.maximum(counts - 4, 0))
    assert (overflow > 0).mean() > 0.3


@pytest.mark.parametrize("count", [5, 6, 7])
def test_truncation_returns_a_uniform_subset(count):
    """Of `count` drawn members each is kept with chance 4 / count, wherever it lies."""
    exact, _ = memberships(SAMPLERS["poisson"], 20, 5, 20)
    cut, _ = memberships(OF_FOUR, 20, 5, 20)
    rows = exact.sum(axis=1) == count
    kept = cut[rows][exact[rows]].reshape(-1, count)
    n = len(kept)
    assert n > 1000
    rate = 4 / count
    # Counts of a subset of fixed size: this multiple of the sum of squares is chi-square.
    squares = np.sum((kept.sum(axis=0) - n * rate) ** 2) / (n * rate * (1 - rate))
    statistic = squares * (count - 1) / count
    assert stats.chi2.sf(statistic, count - 1) > RARE
    keep_first = np.arange(count) < 4
    biased = np.sum((n * keep_first - n * rate) ** 2) / (n * rate * (1 - rate))
    assert stats.chi2.sf(biased * (count - 1) / count, count - 1) < RARE


def test_truncation_at_more_than_the_population_is_exact():
    exact, _ = memberships(SAMPLERS["poisson"], 20, 5, 20, 500)
    wide, overflow = memberships(sampling.poisson(capacity=50), 20, 5, 20, 500)
    np.testing.assert_array_equal(wide, exact)
    assert not overflow.any()


@pytest.mark.parametrize("size, batch_size", [(20, 5), (9, 1), (20, 19)])
def test_fixed_size_is_a_uniform_subset(size, batch_size):
    members, overflow = memberships(SAMPLERS["fixed_size"], size, batch_size, 20)
    assert np.all(members.sum(axis=1) == batch_size) and not overflow.any()
    assert not members[:, size:].any()
    members, rate = members[:, :size], batch_size / size
    squares = np.sum((members.sum(axis=0) - NUM_DRAWS * rate) ** 2)
    statistic = squares / (NUM_DRAWS * rate * (1 - rate)) * (size - 1) / size
    assert RARE < stats.chi2.sf(statistic, size - 1) < 1 - RARE
    together = members.T.astype(float) @ members.astype(float) / NUM_DRAWS
    pairs = together[np.triu_indices(size, 1)]
    expected = batch_size * (batch_size - 1) / (size * (size - 1))
    spread = stats.norm.isf(RARE / len(pairs)) * np.sqrt(expected * (1 - expected) / NUM_DRAWS)
    assert np.abs(pairs - expected).max() <= spread


@pytest.mark.parametrize("size", [0, 1, 3])
def test_fixed_size_of_more_than_there_are_draws_all(size):
    members, overflow = memberships(SAMPLERS["fixed_size"], size, 5, 8, 50)
    assert members[:, :size].all() and not members[:, size:].any() and not overflow.any()


@pytest.mark.parametrize("size", [0, 1, 8])
def test_full_participation_draws_all(size):
    members, _ = memberships(SAMPLERS["full_participation"], size, 3, 8, 2)
    assert members[:, :size].all() and not members[:, size:].any()
    assert sampling.full_participation().nominal_size(size, 3) == size


@functools.cache
def step_of(sampler, limit, capacity):
    return jax.jit(lambda *given: sampler.draw(*given, limit, capacity))


def blocks(sampler, size, batch_size, limit, steps, key=0, capacity=None):
    """The members of each of consecutive steps, in order."""
    capacity = sampler.capacity(limit, batch_size) if capacity is None else capacity
    draw, state, out = step_of(sampler, limit, capacity), sampler.init(limit), []
    for t in range(steps):
        state, drawn = draw(state, jax.random.key(key), t, jnp.int32(size), jnp.int32(batch_size))
        out.append(np.asarray(drawn.indices)[np.asarray(drawn.is_real)].tolist())
    return out


def test_cyclic_reads_blocks_over_and_over_without_randomness():
    expected = [[0, 1, 2], [3, 4, 5], [6]] * 2
    for key in (0, 1):
        assert blocks(SAMPLERS["cyclic"], 7, 3, 10, 6, key) == expected


@pytest.mark.parametrize("size", later([0, 1, 5, 6, 11], but=[0, 11], soon=[5]))
@pytest.mark.parametrize("batch_size", later([1, 3, 20], but=[3, 20]))
def test_shuffled_reads_each_example_once_an_epoch(size, batch_size):
    per_epoch = max(1, -(-size // batch_size))
    got = blocks(SAMPLERS["shuffled"], size, batch_size, 12, 3 * per_epoch)
    epochs = [list(chain(*got[i : i + per_epoch])) for i in range(0, len(got), per_epoch)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(size))
    full = [len(b) for b in got]
    assert max(full) == min(size, batch_size)
    if size >= 5:
        assert epochs[0] != epochs[1] != epochs[2]
        other = blocks(SAMPLERS["shuffled"], size, batch_size, 12, per_epoch, key=1)
        assert list(chain(*other)) != epochs[0]


@pytest.mark.parametrize("size", later([0, 1, 5, 6, 11], but=[0, 6, 11]))
@pytest.mark.parametrize("batch_size", later([1, 3, 20], but=[3, 20]))
def test_whole_blocks_are_all_that_is_read(size, batch_size):
    """Of each epoch as many whole blocks as there are, of distinct members; else all in one."""
    per_epoch = max(1, size // batch_size)
    sampler = SAMPLERS["shuffled_whole"]
    assert int(sampler.num_steps_per_epoch(np.int32(size), batch_size)) == per_epoch
    got = blocks(sampler, size, batch_size, 12, 3 * per_epoch)
    assert {len(b) for b in got} == {min(size, batch_size)}
    epochs = [list(chain(*got[i : i + per_epoch])) for i in range(0, len(got), per_epoch)]
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch) and set(epoch) <= set(range(size))
    if size >= 5:
        assert epochs[0] != epochs[1] != epochs[2]


def test_shuffled_orders_are_uniform():
    """All 24 orders of four examples, in a store with room for more."""
    sampler = sampling.shuffled()

    @jax.jit
    @jax.vmap
    def order(key):
        state = sampler.init(7)
        return sampler.draw(state, key, 0, jnp.int32(4), 4, 7, 4)[1].indices

    orders = np.asarray(order(jax.random.split(jax.random.key(2), NUM_DRAWS)))
    codes, counts = np.unique(orders @ [64, 16, 4, 1], return_counts=True)
    assert len(codes) == 24
    assert stats.chisquare(counts).pvalue > RARE


@telling
@pytest.mark.parametrize("name", SAMPLERS)
def test_one_call_draws_for_clients_of_different_sizes(name):
    sampler, limit = SAMPLERS[name], 9
    sizes, batches = jnp.array([0, 1, 4, 9, 9]), jnp.array([3, 3, 2, 3, 1])
    capacity = sampler.capacity(limit, 3)

    @jax.jit
    def draw(key):
        def one(i, size, batch):
            state, own = sampler.init(limit), jax.random.fold_in(key, i)
            return sampler.draw(state, own, 0, size, batch, limit, capacity)[1]

        return jax.vmap(one)(jnp.arange(5), sizes, batches)

    def alone(key, i):
        state, own = sampler.init(limit), jax.random.fold_in(key, i)
        return sampler.draw(state, own, 0, int(sizes[i]), int(batches[i]), limit, capacity)[1]

    for seed in range(20):
        key = jax.random.key(seed)
        drawn = jax.tree.map(np.asarray, draw(key))
        for i in range(5):
            count = int(drawn.is_real[i].sum())
            # The drawn ones come first, point at the client's own examples, and are distinct.
            assert drawn.is_real[i][:count].all()
            indices = drawn.indices[i][:count]
            assert np.all(indices < sizes[i]) and len(set(indices.tolist())) == count
            assert np.all(drawn.indices[i] >= 0)
            if seed < 2:
                single = alone(key, i)
                np.testing.assert_array_equal(single.indices, drawn.indices[i])
                np.testing.assert_array_equal(single.is_real, drawn.is_real[i])


@telling
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_larger_limit_changes_no_draw(name):
    """Padding: room for larger clients beside this one changes nothing."""
    sampler, takes_all = SAMPLERS[name], name in ("poisson", "full_participation")
    narrow, wide = (
        blocks(sampler, 8, 3, limit, 3, 1, limit if takes_all else sampler.capacity(8, 3))
        for limit in (8, 40)
    )
    assert narrow == wide


GAUSSIAN = dp_accounting.GaussianDpEvent(1.3)


def test_events_are_those_of_dp_accounting():
    dpe, poisson = dp_accounting.dp_event, dp_accounting.PoissonSampledDpEvent
    for sampler, size, expected in (
        (sampling.poisson(), 100, poisson(0.05, GAUSSIAN)),
        (sampling.poisson(7), 100, dpe.TruncatedSubsampledGaussianDpEvent(100, 0.05, 7, 1.3)),
        (sampling.poisson(7), 7, poisson(5 / 7, GAUSSIAN)),
        (sampling.fixed_size(), 100, dpe.SampledWithoutReplacementDpEvent(100, 5, GAUSSIAN)),
        *((sampling.fixed_size(), 5, GAUSSIAN), (sampling.cyclic(), 100, GAUSSIAN)),
        (sampling.full_participation(), 100, GAUSSIAN),
    ):
        assert sampler.event(GAUSSIAN, size, 5) == expected


def test_what_has_no_analysis_is_refused_and_the_nearest_choice_named():
    with pytest.raises(ValueError, match=r"never reported with a Poisson epsilon.*poisson\(\)"):
        sampling.shuffled().event(GAUSSIAN, 100, 5)
    with pytest.raises(ValueError, match=r"Gaussian noise only.*poisson\(\) without a capacity"):
        sampling.poisson(7).event(dp_accounting.LaplaceDpEvent(1.0), 100, 5)


@pytest.mark.parametrize("name", ["poisson", "truncated", "fixed_size"])
def test_known_draws_are_those_of_the_sampler_and_cost_the_base_event(name):
    sampler = SAMPLERS[name]
    known = sampling.without_amplification(sampler)
    assert blocks(known, 20, 5, 20, 4, 1, 20) == blocks(sampler, 20, 5, 20, 4, 1, 20)
    assert known.event(GAUSSIAN, 100, 5) == GAUSSIAN != sampler.event(GAUSSIAN, 100, 5)
    assert not known.charges_all and known.varies == sampler.varies
    assert known.min_drawn(20, 5) == sampler.min_drawn(20, 5)


def test_only_sampling_without_randomness_charges_those_drawn_alone():
    assert not sampling.cyclic().charges_all
    assert all(s.charges_all for n, s in SAMPLERS.items() if n != "cyclic")
    assert {n for n, s in SAMPLERS.items() if s.varies} == {"poisson", "truncated"}


LARGE, ROOM = 9_000, 10_000


def large_draws(sampler, size, batch_size, num_draws=NUM_DRAWS):
    """Draws from a large population: indices, who is real, what found no slot."""
    capacity = sampler.capacity(ROOM, batch_size)
    assert capacity < 200

    @jax.jit
    @jax.vmap
    def draw(key):
        state = sampler.init(ROOM)
        return sampler.draw(state, key, 0, jnp.int32(size), batch_size, ROOM, capacity)[1]

    return jax.tree.map(np.asarray, draw(jax.random.split(jax.random.key(4), num_draws)))


def p_of_alike(members, size):
    """Chi-square of how often each member is in, and each hundredth of the population."""
    counts = np.bincount(members.ravel(), minlength=size)
    hundredths = np.bincount(np.arange(size) * 100 // size, counts)
    sizes = np.bincount(np.arange(size) * 100 // size)
    expected = sizes * counts.sum() / size
    return stats.chisquare(counts).pvalue, stats.chisquare(hundredths, expected).pvalue


def p_of_law(values, law, num_bins):
    """Chi-square of values between the quantiles of a law."""
    edges = np.unique(law.ppf(np.arange(1, num_bins) / num_bins))
    observed = np.bincount(np.searchsorted(edges, values), minlength=len(edges) + 1)
    cdf = np.concatenate([[0], law.cdf(edges), [1]])
    return stats.chisquare(observed, np.diff(cdf) * len(values)).pvalue


@telling
def test_poisson_draws_from_many_are_those_of_coins():
    """Counts are binomial, members alike, gaps geometric; a rate that is off is found."""
    drawn = large_draws(sampling.poisson(), LARGE, 50.0)
    counts, rate = drawn.is_real.sum(axis=1), 50 / LARGE

    def p_of_counts(rate):
        return p_of_law(counts, stats.binom(LARGE, rate), 20)

    assert p_of_counts(rate) > RARE
    assert max(p_of_counts(1.01 * rate), p_of_counts(0.99 * rate)) < RARE
    members = drawn.indices[drawn.is_real]
    assert members.max() < LARGE and min(p_of_alike(members, LARGE)) > RARE
    assert not drawn.overflow.any()
    # The first slots are always filled: gaps behind them are no selection.
    gaps = np.diff(drawn.indices[:, :20], axis=1).ravel()
    assert gaps.min() >= 1

    def p_of_gaps(rate):
        return p_of_law(gaps, stats.geom(rate), 40)

    assert p_of_gaps(rate) > RARE > p_of_gaps(1.02 * rate)


@pytest.mark.parametrize("rate", [1 / 32, 0.01, 1e-3, 1e-4, 1e-6])
def test_given_all_others_no_member_is_in_at_more_than_the_rate_accounted(rate):
    """The odds of a member between two gaps, from the numbers that bits are compared with."""
    odds, is_used, continues, piece = map(np.asarray, sparse.digits(jnp.float32(rate)))
    chances, continues = odds[is_used] / 2.0**32, float(continues) / 2.0**32
    logs = np.log(chances) - np.log1p(-chances)
    assert 2 ** len(chances) == piece and np.exp(-8.01) < continues < np.exp(-3.9)

    def log_chance(gap):
        digits = (gap[:, None] >> np.arange(len(chances))) & 1
        of_digits = np.sum(np.log1p(-chances)) + digits @ logs
        return of_digits + np.log1p(-continues) + (gap // int(piece)) * np.log(continues)

    rng = np.random.default_rng(0)
    before, behind = rng.integers(0, 4 * int(piece), (2, 200_000))
    few = np.array(np.meshgrid(np.arange(300), np.arange(300))).reshape(2, -1)
    before, behind = np.concatenate([[before, behind], few], axis=1)
    found = log_chance(before) + log_chance(behind) - log_chance(before + behind + 1)
    excess = found - np.log(rate / (1 - rate))
    assert excess.min() > -1.5e-4 and excess.max() < 0


def test_slots_overflow_with_a_chance_below_all_that_counts():
    for mean in (0.5, 1, 8, 64, 1000, 30_000):
        slots = sparse.tail(mean)
        assert stats.poisson.logsf(slots - 1, mean) < -100 * np.log(2)
        assert slots < mean + 13 * np.sqrt(mean) + 45
        assert mean <= sparse.mean_of(slots) <= mean + 2


@telling
def test_a_draw_larger_than_its_slots_is_reported(monkeypatch):
    sampler = sampling.poisson()
    counts = []
    for slots in (200, 4):
        drawn = sampler.draw((), jax.random.key(0), 0, jnp.int32(LARGE), 50.0, ROOM, slots)[1]
        counts.append((int(drawn.is_real.sum()), int(drawn.overflow)))
    assert counts[0][0] > 4 and counts[0][1] == 0 and counts[1] == (4, 1)


@telling
@pytest.mark.parametrize("batch_size", [1, 50])
def test_fixed_size_draws_from_many_are_uniform_subsets(batch_size):
    drawn = large_draws(sampling.fixed_size(), LARGE, batch_size)
    assert drawn.is_real.all() and drawn.indices.max() < LARGE
    ordered = np.sort(drawn.indices, axis=1)
    assert np.all(np.diff(ordered, axis=1) > 0)
    assert min(p_of_alike(drawn.indices, LARGE)) > RARE


def test_members_drawn_before_are_drawn_again():
    """So many of so few that nearly every draw has to be made again."""
    draw = jax.jit(jax.vmap(lambda k: sparse.distinct(k, jnp.int32(20), jnp.int32(9), 12)))
    rows = np.asarray(draw(jax.random.split(jax.random.key(0), NUM_DRAWS)))[:, :9]
    assert np.all(np.diff(np.sort(rows, axis=1), axis=1) > 0)
    members = np.zeros((NUM_DRAWS, 20))
    np.put_along_axis(members, rows, 1, axis=1)
    pairs = members.T @ members
    each = 9 / 20 * NUM_DRAWS
    assert np.abs(np.diag(pairs) - each).max() < 5 * np.sqrt(each)
    both = 9 * 8 / (20 * 19) * NUM_DRAWS
    assert np.abs(pairs[np.triu_indices(20, 1)] - both).max() < 5 * np.sqrt(both)


@pytest.mark.parametrize("size", [1025, 4096, LARGE])
def test_an_epoch_of_many_reads_each_example_once(size):
    batch = 100
    steps = -(-size // batch)
    read = blocks(SAMPLERS["shuffled"], size, batch, ROOM, 2 * steps, 1, batch)
    for epoch in (read[:steps], read[steps:]):
        assert np.array_equal(np.sort(np.concatenate(epoch)), np.arange(size))
    assert len(read[steps - 1]) == size - (steps - 1) * batch
    first, second = (np.concatenate(epoch) for epoch in (read[:steps], read[steps:]))
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(size)
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 5 / np.sqrt(size)


@telling
def test_orders_of_many_are_alike():
    first = jax.jit(jax.vmap(lambda k: sparse.permuted(k, jnp.arange(64), jnp.int32(LARGE))))
    rows = np.asarray(first(jax.random.split(jax.random.key(2), NUM_DRAWS)))
    for place in (0, 1, 63):
        assert min(p_of_alike(rows[:, place], LARGE)) > RARE
    correlation = np.corrcoef(rows.T.astype(float))[np.triu_indices(64, 1)]
    assert np.abs(correlation).max() < stats.norm.isf(RARE / len(correlation)) / np.sqrt(NUM_DRAWS)


@telling
@pytest.mark.parametrize("name", ["poisson", "fixed_size", "shuffled"])
@pytest.mark.parametrize("size", [50, 5000])
def test_much_larger_populations_and_batches_beside_this_one_change_no_draw(name, size):
    sampler = SAMPLERS[name]
    first, *others = (
        blocks(sampler, size, 7, limit, 3, 1, sampler.capacity(limit, largest))
        for limit, largest in ((5000, 7), (200_000, 7), (200_000, 100))
    )
    assert others == [first, first]


@pytest.mark.parametrize("name", ["poisson", "fixed_size", "shuffled"])
def test_draws_from_many_inspect_few(name):
    """No array of a draw, or between draws, is as large as the population."""
    sampler, limit = SAMPLERS[name], 1_000_000
    capacity = sampler.capacity(limit, 64)
    state = sampler.init(limit)
    jaxpr = jax.make_jaxpr(
        lambda state, size: sampler.draw(state, jax.random.key(0), 0, size, 64, limit, capacity)
    )(state, jnp.int32(limit))
    shapes = [v.aval.shape for eqn in jaxpr_equations(jaxpr.jaxpr) for v in eqn.outvars]
    assert max(int(np.prod(shape)) for shape in shapes) < 20_000


def jaxpr_equations(jaxpr):
    """All equations of a jaxpr, at every depth."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from jaxpr_equations(inner)


@pytest.mark.parametrize("name", ["shuffled", "shuffled_whole"])
def test_the_fewest_of_a_shuffled_draw_are_those_of_its_last_block(name):
    """A threshold of clients would otherwise be promised that the last round of an epoch misses."""
    counts = [len(block) for block in blocks(SAMPLERS[name], 8, 3, 12, 3)]
    assert SAMPLERS[name].min_drawn(8, 3) == min(counts)
