"""Correct subjects in NumPy, and 103 defects with the check that should find each."""

import dataclasses

import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import stats

from fedjax_dp.audit.conformance import (
    Accounting,
    AdaptiveAggregation,
    AdaptiveRelease,
    Aggregation,
    FixedSize,
    Masked,
    Masking,
    MaskLaw,
    MaskSource,
    Poisson,
    Release,
    Run,
    Sampling,
    Shuffled,
    Step,
    Training,
    WeightedAggregation,
    WithReplacement,
)

C, S, D = 1.0, 2.0, 10.0
CLAIM = Release(C, S, D, layers=(5, 3))
SIZE, ROWS = CLAIM.size, CLAIM.rows


# The parts of a correct aggregation, each of which a defect replaces.


def finite(rows):
    return np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0).astype(np.float64)


def clip(rows, bound=C):
    norms = np.sqrt(np.sum(np.square(rows), axis=1, keepdims=True))
    return rows * np.minimum(1, bound / np.maximum(norms, 1e-300))


def gaussian(seed, rows, size=SIZE, stddev=S):
    del rows
    return np.random.default_rng(seed).normal(0, stddev, size)


def divide(total, rows):
    del rows
    return total / D


def aggregation(name="correct", claim=CLAIM, *, of=Aggregation, clean=finite, bound=clip, **parts):
    noise, over = parts.get("noise", gaussian), parts.get("divide", divide)
    combine = parts.get("combine", lambda rows: rows.sum(axis=0))

    def aggregate(rows, seed):
        total = combine(bound(clean(rows)))
        return over(total + noise(seed, rows), rows)

    return of(name, aggregate, claim)


def weighted(
    name="correct with weights", weigh=lambda rows, w: clip(rows * w), scale=lambda w: 1.0
):
    def aggregate(rows, weights, seed):
        with_weights = np.column_stack([rows, weights])
        good = np.isfinite(with_weights).all(axis=1, keepdims=True)
        rows, weights = np.where(good, rows, 0), np.where(good[:, 0], weights, 0)[:, None]
        total = weigh(rows.astype(float), weights.astype(float)).sum(axis=0)
        return (total + gaussian(seed, 0) * scale(weights)) / D

    return WeightedAggregation(name, aggregate, CLAIM)


def laplace(seed, rows, scale=S / np.sqrt(2)):
    del rows
    return np.random.default_rng(seed).laplace(0, scale, SIZE)


def clip_l1(rows):
    norms = np.abs(rows).sum(axis=1, keepdims=True)
    return rows * np.minimum(1, C / np.maximum(norms, 1e-300))


def unseeded():
    """Noise that no seed repeats."""
    rng = np.random.default_rng(123)
    return lambda seed, rows: rng.normal(0, S, SIZE)


def adaptive(
    name="correct, adaptive",
    sign=-1.0,
    power=1.0,
    *,
    of_round=lambda seed, i: np.random.default_rng([seed, i]).normal(0, S, SIZE),
    scale=lambda bound: bound,
    clean=finite,
    below=lambda norms: norms <= 1,
    count_stddev=0.5,
):
    first = dataclasses.replace(CLAIM, noise_stddev=S)

    def aggregate(rounds, seed):
        bound, outputs, bounds = C, [], []
        for i, rows in enumerate(rounds):
            bounds.append(bound)
            noise = of_round(seed, i) * scale(bound)
            outputs.append((clip(finite(rows), bound**power).sum(axis=0) + noise) / D)
            # Of n rows, the share whose norm is at most the bound, with noise.
            norms = np.linalg.norm(clean(rows), axis=1)
            count = np.sum(below(norms / bound))
            count += np.random.default_rng([seed, i, 1]).normal(0, count_stddev)
            bound *= np.exp(sign * 0.3 * (count / ROWS - 0.5))
        return np.stack(outputs), np.array(bounds)

    return AdaptiveAggregation(name, aggregate, AdaptiveRelease(first, 0.5))


# Units that are drawn.

UNITS, DRAWN = 40, 8


def rounds_of(one):
    """A draw of rounds from that of one round, `(rng, state) -> indices`."""
    return lambda rounds, seed: [one(np.random.default_rng([seed, i])) for i in range(rounds)]


def poisson(rng, units=UNITS, rate=DRAWN / UNITS):
    return np.flatnonzero(rng.random(units) < rate)


def fixed(rng):
    return rng.choice(UNITS, DRAWN, replace=False)


def shuffled(rounds, seed):
    rng, order, drawn = np.random.default_rng(seed), [], []
    for _ in range(rounds):
        if len(order) < DRAWN:
            order = list(rng.permutation(UNITS))
        drawn.append([order.pop() for _ in range(DRAWN)])
    return drawn


def drawn_again(rng):
    while not len(found := poisson(rng, 8, 0.1)):
        pass
    return found


def of_two_rates(rng):
    return np.flatnonzero(rng.random(UNITS) < np.where(np.arange(UNITS) % 2, 0.22, 0.18))


def surely_later(rounds, seed):
    drawn = rounds_of(poisson)(rounds, seed)
    return [np.union1d(found, [0] if i % 10 == 9 else []) for i, found in enumerate(drawn)]


def unequal(rng):
    return np.flatnonzero(rng.random(UNITS) < np.where(np.arange(UNITS) == 3, 0.5, DRAWN / UNITS))


# Whole trainings.

TRAINED = Training(Release(C, 1.0, D, layers=(4,)), Poisson(12, 0.5), 3, 1e-5)
# Of its rounds, one in fourteen is empty.
SPARSE = dataclasses.replace(TRAINED, sampling=Poisson(12, 0.2))
# A training whose sampling amplifies nothing can be attacked with few runs.
FULL = Training(Release(C, 2.0, D, layers=(4,)), FixedSize(6, 6), 3, 1e-5)


def training(
    name, claim=TRAINED, *, stddev=1.0, rate=None, same=False, is_skipped=False, momentum=0.0
):
    release = claim.release
    rate = claim.sampling.rate if rate is None else rate

    def run(rows, seed):
        rows, kept, outputs = clip(finite(rows)), np.zeros(rows.shape), []
        for i in range(claim.rounds):
            rng = np.random.default_rng([seed, i])
            is_drawn = rng.random(len(rows)) < rate
            noise_rng = np.random.default_rng([seed, 0 if same else i, 1])
            noise = noise_rng.normal(0, stddev * release.noise_stddev, release.size)
            noise *= is_drawn.any() or not is_skipped
            kept[is_drawn] = momentum * kept[is_drawn] + rows[is_drawn]
            outputs.append((kept[is_drawn].sum(axis=0) + noise) / D)
        return np.stack(outputs)

    return Run(name, run, claim)


# Accountants.

ACCOUNTED = Training(Release(C, 1.0, D), Poisson(1000, 0.01), 200, 1e-5)
REPLACED = Training(Release(C, 3.0, D, relation="replace_one"), FixedSize(50, 50), 10, 1e-5)


def epsilon(multiplier=1.0, rate=0.01):
    loss = pld.from_gaussian_mechanism(
        multiplier, sampling_prob=rate, value_discretization_interval=1e-3
    )
    return lambda rounds, delta: loss.self_compose(rounds).get_epsilon_for_delta(delta)


# Masks, pairwise.

MODULUS, CLIENTS, ENTRIES = 2**32, 4, 6
MASKED = Masked(MODULUS, CLIENTS, ENTRIES, dropped=2)


def stream_of(key, high, size):
    return np.random.default_rng(key).integers(0, high, size)


def masking(
    name="correct masks",
    *,
    claim=MASKED,
    bits=32,
    of_pair=lambda seed, i, j: [seed, i, j],
    stream=stream_of,
    forgets=False,
    wraps=True,
    renews=True,
):

    def mask(values, is_dropped, seed):
        m, n = claim.modulus, claim.clients
        masks = np.zeros((n, n, claim.size), np.int64)
        for i in range(n):
            for j in range(i + 1, n):
                high = min(2**bits, m)
                of_round = seed if renews or not is_dropped.any() else 0
                masks[i, j] = stream(of_pair(of_round, i, j), high, claim.size)
                masks[j, i] = -masks[i, j]
        messages = values + masks.sum(axis=1)
        messages = messages % m if wraps else messages
        total = messages[~is_dropped].sum(axis=0)
        if not forgets:
            total = total - masks[~is_dropped][:, is_dropped].sum(axis=(0, 1))
        return messages, total % m

    return Masking(name, mask, claim)


def mask_source(name="correct mask source", bits=62):
    """Masks of keys that are folded to a seed of so many bits."""
    claim = MaskLaw(MODULUS)

    def draw(count, seed):
        seeds = np.random.default_rng(seed).integers(0, 2**bits, count)
        return np.stack([np.random.default_rng(s).integers(0, MODULUS, claim.size) for s in seeds])

    return MaskSource(name, draw, claim)


def replaced(**changes):
    return dataclasses.replace(CLAIM, **changes)


def _after_rows(seed, rows):
    """Noise of a generator that every row that is not zero uses before, as to round it."""
    rng = np.random.default_rng(seed)
    rng.random(np.count_nonzero(finite(rows).any(axis=1)))
    return rng.normal(0, S, SIZE)


def _after_order(seed, rows):
    """Noise of a generator that orders the rows that are finite before."""
    rng = np.random.default_rng(seed)
    rng.permutation(np.count_nonzero(np.isfinite(rows).all(axis=1)))
    return rng.normal(0, S, SIZE)


def correct():
    """Subjects that do what they claim."""
    yield aggregation()
    yield aggregation("a step", of=Step)
    yield aggregation("zero-out", replaced(relation="zero_out"))
    yield aggregation("replace-one", replaced(relation="replace_one"))
    yield aggregation("laplace", replaced(norm="l1", law="laplace"), bound=clip_l1, noise=laplace)
    yield aggregation("no seed", noise=unseeded())
    yield aggregation(
        "realised divisor under zero-out",
        replaced(relation="zero_out", divisor=None),
        divide=lambda total, rows: total / len(rows),
    )
    yield aggregation(
        "one entry", replaced(layers=(0, 1)), noise=lambda seed, rows: gaussian(seed, rows, 1)
    )
    yield aggregation(
        "numbers drawn for each row", replaced(relation="zero_out"), noise=_after_rows
    )
    yield aggregation("rows in an order that is drawn", noise=_after_order)
    yield weighted()
    yield adaptive()
    yield adaptive("adaptive, no seed", of_round=lambda seed, i, noise=unseeded(): noise(seed, i))
    yield Sampling("poisson", rounds_of(poisson), Poisson(UNITS, DRAWN / UNITS))
    yield Sampling("fixed", rounds_of(fixed), FixedSize(UNITS, DRAWN))
    yield Sampling(
        "sparse poisson", rounds_of(lambda rng: poisson(rng, 1000, 0.005)), Poisson(1000, 0.005)
    )
    yield Sampling(
        "sparse fixed",
        rounds_of(lambda rng: rng.choice(1000, 5, replace=False)),
        FixedSize(1000, 5),
    )
    yield Sampling("shuffled", shuffled, Shuffled(UNITS, DRAWN))
    yield Sampling(
        "with replacement",
        rounds_of(lambda rng: rng.integers(0, UNITS, DRAWN)),
        WithReplacement(UNITS, DRAWN),
    )
    yield training("a training")
    yield training("everyone", FULL)
    yield Accounting("accounted", epsilon(), ACCOUNTED)
    yield Accounting("accounted, replaced", epsilon(1.5, 1.0), REPLACED)
    yield masking()


def _layers_clipped(rows):
    return np.concatenate([clip(rows[:, :5]), clip(rows[:, 5:])], axis=1)


def _one_layer(seed, rows):
    return gaussian(seed, rows) * np.repeat([1, 0], [5, 3])


def _raises(rows):
    if not np.isfinite(rows).all():
        raise FloatingPointError("NaN")
    return rows.astype(float)


def _chunked(seed, rows):
    chunks = max(1, -(-len(rows) // 8))
    return np.random.default_rng(seed).normal(0, S, (chunks, SIZE)).sum(axis=0)


def _normalised(rows):
    """Every row to the clip norm, by a norm in float32, whose squares vanish for small rows."""
    norms = np.sqrt(np.sum(np.square(rows.astype(np.float32)), axis=1, keepdims=True))
    return np.where(norms > 0, rows * C / np.where(norms > 0, norms, 1), 0)


def _pairs(rows):
    """Clips the sum of every two rows, as a micro-batch of two does."""
    padded = np.concatenate([rows, np.zeros((len(rows) % 2, SIZE))])
    return clip(padded.reshape(-1, 2, SIZE).mean(axis=1)) * 2


def _over(count):
    return lambda total, rows: total / max(count(rows), 1)


def _moving(seed, rows):
    return (gaussian(seed, rows) + gaussian(seed + 1, rows)) / np.sqrt(2)


# Layers of one shape, and a larger one.
LIKE = replaced(layers=(8, 8, 84))


def _key_of_shape(seed, rows):
    of_both = gaussian(seed, rows, 8)
    return np.concatenate([of_both, of_both, gaussian([seed, 1], rows, 84)])


def _counter(seed, rows):
    return np.random.Generator(np.random.Philox(key=3, counter=seed)).normal(0, S, SIZE)


def _cut_off(seed, rows):
    noise = gaussian(seed, rows, 9 * SIZE, 1.0)
    # The variance of what is left of a Gaussian within two standard deviations.
    return noise[np.abs(noise) < 2][:SIZE] * S / np.sqrt(0.77374)


def _cut_off_at_3(seed, rows):
    noise = gaussian(seed, rows, 9 * SIZE, 1.0)
    return noise[np.abs(noise) < 3][:SIZE] * S / np.sqrt(0.97334)


def _on_a_sphere(seed, rows):
    noise = gaussian(seed, rows)
    return noise * S * np.sqrt(SIZE) / np.linalg.norm(noise)


_QUANTILES = S * stats.norm.ppf((np.arange(2**12) + 0.5) / 2**12)


def _of_12_bits(seed, rows):
    del rows
    return _QUANTILES[np.random.default_rng(seed).integers(0, 2**12, SIZE)]


def _an_entry_at_times(seed, rows):
    is_there = np.random.default_rng([seed, 1]).random() < 0.85
    return gaussian(seed, rows) * np.where(np.arange(SIZE) == 2, is_there, 1)


def _of_a_large_row(rng=np.random.default_rng(6)):
    def noise(seed, rows):
        is_one = np.sum(np.abs(finite(rows)).max(axis=1, initial=0) > 100) == 1
        return rng.normal(0, S * (0.5 if is_one else 1), SIZE)

    return noise


def _fixed_point(rows):
    """The sum in integers of 32 bits, of which eight rows of the clip norm leave the range."""
    return np.int32(np.rint(rows * 2**28)).sum(axis=0, dtype=np.int32) / 2**28


def _of_norms(rng=np.random.default_rng(5)):
    def noise(seed, rows):
        longest = np.linalg.norm(finite(rows), axis=1).max(initial=0)
        return rng.normal(0, S * min(1, longest / C or 1), SIZE)

    return noise


def _first_chunk_clipped(rows):
    return np.concatenate([clip(rows[:8]), rows[8:]])


def _mean_of_chunks(rows):
    return rows.sum(axis=0) / max(1, -(-len(rows) // 8))


def _cohort_again(rounds, seed):
    return [fixed(np.random.default_rng([seed, i % 2])) for i in range(rounds)]


def _one_order(rounds, seed):
    order = np.random.default_rng(seed).permutation(UNITS).reshape(-1, DRAWN)
    return [order[i % len(order)] for i in range(rounds)]


def _strata(rng):
    return rng.integers(0, UNITS // DRAWN, DRAWN) * DRAWN + np.arange(DRAWN)


def _as_another(rng):
    chances = rng.random(UNITS)
    chances[20] = chances[3]
    return np.flatnonzero(chances < DRAWN / UNITS)


def _negated(key, high, size):
    """The numbers of the seed before, negated, for every odd seed."""
    seed, *pair = key
    return stream_of([seed // 2, *pair], high, size) * (-1) ** seed


def _halves(key, high, size):
    return np.tile(stream_of(key, high, size // 2), 2)


def _shifted(key, high, size):
    """Numbers of one stream, of which the next seed takes all but the first."""
    seed, *pair = key
    return stream_of(pair, high, 1000 + size)[seed % 1000 :][:size]


def planted():
    """Every defect: the subject, and the check that should find it."""
    sd, reply = "noise: standard deviation", "noise: whoever replies"
    noises = {
        "noise twice": (lambda s, r: gaussian(s, r) + gaussian(s + 10**9, r), sd),
        "half the noise": (lambda s, r: gaussian(s, r) / 2, sd),
        "variance for deviation": (lambda s, r: gaussian(s, r, stddev=S**2), sd),
        "noise of a layer missing": (_one_layer, sd),
        "noise with a mean": (lambda s, r: gaussian(s, r) + 1, sd),
        "no noise on an empty cohort": (lambda s, r: gaussian(s, r) * (len(r) > 0), reply),
        "noise for each chunk": (_chunked, reply),
        "noise grows with replies": (lambda s, r: gaussian(s, r) * len(r) / ROWS, reply),
        "noise that NaN switches off": (lambda s, r: gaussian(s, r) * np.isfinite(r).all(), reply),
        "noise scaled by the rows": (
            lambda s, r: gaussian(s, r) / (1 + (np.abs(r) > 1e3).any()),
            reply,
        ),
        "Laplace for Gaussian": (laplace, "noise: law"),
        "uniform for Gaussian": (
            lambda s, r: np.random.default_rng(s).uniform(-1, 1, SIZE) * S * np.sqrt(3),
            "noise: law",
        ),
        "the same noise for every entry": (
            lambda s, r: np.full(SIZE, gaussian(s, r)[0]),
            "noise: independence of entries",
        ),
        "the same noise for every seed": (
            lambda s, r: gaussian(5, r),
            "noise: independence of seeds",
        ),
        "noise shared by seeds in a row": (_moving, "noise: independence of seeds"),
    }
    for name, (noise, check) in noises.items():
        yield aggregation(name, noise=noise), check
    of_rows = {
        "layers clipped one by one": ({"bound": _layers_clipped}, "layers"),
        "clipped after the mean": (
            {
                "bound": lambda rows: rows,
                "combine": lambda rows: clip(rows.sum(axis=0, keepdims=True) / D)[0] * D,
            },
            "size of a row",
        ),
        "not clipped": ({"bound": lambda rows: rows}, "size of a row"),
        "entries clipped one by one": (
            {"bound": lambda rows: np.clip(rows, -C, C)},
            "size of a row",
        ),
        "clipped to the median norm": (
            {"bound": lambda r: clip(r, np.median(np.linalg.norm(r, axis=1)) if len(r) else C)},
            "others",
        ),
        "norm in float32": ({"bound": _normalised}, "size of a row"),
        "a micro-batch clipped": ({"bound": _pairs}, "others"),
        "NaN poisons": ({"clean": lambda rows: rows.astype(float)}, "not finite"),
        "infinity becomes NaN": (
            {"clean": lambda r: np.where(np.isnan(r).any(axis=1, keepdims=True), 0, r)},
            "not finite",
        ),
        "an error on NaN": ({"clean": _raises}, "not finite"),
        "realised divisor": ({"divide": _over(len)}, "divisor"),
        "a divisor of rows that are not zero": (
            {"divide": _over(lambda rows: np.sum(rows.any(axis=1)))},
            "divisor",
        ),
        "copies counted once": ({"bound": lambda r: np.unique(clip(r), axis=0)}, "divisor"),
        "an error without clients": (
            {"clean": lambda r: finite(r) * (1 / (len(r) and 1))},
            "alone",
        ),
    }
    for name, (parts, check) in of_rows.items():
        yield aggregation(name, **parts), f"contribution: {check}"
    yield (
        aggregation(
            "layers clipped, no seed", noise=unseeded(), bound=lambda r: 2 * _layers_clipped(r)
        ),
        "contribution: mean shift",
    )
    yield aggregation("not clipped step", of=Step, bound=lambda r: r), "contribution: size of a row"
    yield weighted("weight after clip", lambda r, w: clip(r) * w), "contribution: weights"
    yield (
        weighted(
            "weights of the cohort", lambda r, w: D * clip(r) * w / max(np.abs(w).sum(), 1e-9)
        ),
        "contribution: divisor",
    )
    far, near = (f"contribution: clip norm of rows {f} times as long" for f in ("10", "0.1"))
    yield adaptive("clip norm with the wrong sign", sign=1.0), far
    yield adaptive("clip norm that only grows", sign=0.0), near
    yield (
        adaptive("clipped to another norm", power=2.0),
        "contribution: last round of rows 10 times as long",
    )
    size, rate = "sampling: size of a round", DRAWN / UNITS
    yield Sampling("fixed as Poisson", rounds_of(fixed), Poisson(UNITS, rate)), size
    yield Sampling("shuffled as Poisson", shuffled, Poisson(UNITS, rate)), size
    yield Sampling("empty rounds drawn again", rounds_of(drawn_again), Poisson(8, 0.1)), size
    yield Sampling("Poisson as fixed", rounds_of(poisson), FixedSize(UNITS, DRAWN)), size
    in_a_row = "sampling: rounds in a row"
    yield Sampling("shuffled as fixed", shuffled, FixedSize(UNITS, DRAWN)), in_a_row
    yield Sampling("fixed as shuffled", rounds_of(fixed), Shuffled(UNITS, DRAWN)), in_a_row
    yield (
        Sampling(
            "one cohort for all rounds",
            lambda rounds, seed: [fixed(np.random.default_rng(seed))] * rounds,
            FixedSize(UNITS, DRAWN),
        ),
        in_a_row,
    )
    yield (
        Sampling(
            "with replacement as fixed",
            rounds_of(lambda rng: rng.integers(0, UNITS, DRAWN)),
            FixedSize(UNITS, DRAWN),
        ),
        "sampling: draws",
    )
    yield (
        Sampling(
            "blocks as fixed",
            rounds_of(lambda rng: (rng.integers(UNITS) + np.arange(DRAWN)) % UNITS),
            FixedSize(UNITS, DRAWN),
        ),
        "sampling: pairs of units",
    )
    yield (
        Sampling("a unit drawn more often", rounds_of(unequal), Poisson(UNITS, rate)),
        "sampling: rate of a unit",
    )
    for name, draw in (
        ("units of two rates", rounds_of(of_two_rates)),
        ("a unit surely drawn in every tenth round", surely_later),
    ):
        yield Sampling(name, draw, Poisson(UNITS, rate)), "sampling: rate of a unit"
    full = epsilon()
    yield (
        Accounting("ε of fewer rounds", lambda t, d: full(t // 2, d), ACCOUNTED),
        "accounting: epsilon",
    )
    yield Accounting("δ ignored", lambda t, d: full(t, 1e-5), ACCOUNTED), "accounting: delta"
    yield Accounting("rounds ignored", lambda t, d: full(200, d), ACCOUNTED), "accounting: rounds"
    yield Accounting("half the rate", epsilon(rate=0.005), ACCOUNTED), "accounting: epsilon"
    yield (
        Accounting("replaced as removed", epsilon(3.0, 1.0), REPLACED),
        "accounting: epsilon",
    )
    yield masking("masks that drop-outs leave", forgets=True), "masks: sum, 1 dropped out"
    yield masking("masks of 28 bits", bits=28), "masks: uniform"
    yield mask_source("masks with seeds of 20 bits", bits=20), "masks: repeated"
    yield masking("masks of every round", of_pair=lambda s, i, j: [i, j]), "masks: unrelated"
    yield masking("one mask for all pairs", of_pair=lambda s, i, j: [s]), "masks: unrelated"
    yield masking("masks without a modulus", wraps=False), "masks: sum"
    yield (
        training("the noise of every round", same=True),
        "noise: independence of entries",
    )
    yield training("half the noise of a training", FULL, stddev=0.5), "attack: lower bound"
    yield training("drawn in every round", rate=1.0, stddev=0.6), "attack: lower bound"
    yield (
        aggregation("one noise for layers alike", LIKE, noise=_key_of_shape),
        "noise: independence of entries",
    )
    yield aggregation("seeds as a counter", noise=_counter), "noise: independence of seeds"
    yield (
        aggregation("seeds of a period", noise=lambda s, r: gaussian(s % 240, r)),
        "noise: independence of seeds",
    )
    yield aggregation("noise cut off at two deviations", noise=_cut_off), "noise: law"
    yield aggregation("noise of the rows' norms", noise=_of_norms()), reply
    yield weighted("noise of the weights", scale=lambda w: min(1, w.sum())), reply
    others = "contribution: others"
    yield aggregation("a second chunk not clipped", bound=_first_chunk_clipped), others
    yield aggregation("a sum that overflows", combine=_fixed_point), others
    yield aggregation("the mean of chunks", combine=_mean_of_chunks), "contribution: divisor"
    yield (
        aggregation("an imaginary part", divide=lambda total, rows: total / D + 1j * rows.sum()),
        "contribution: call",
    )
    later = "noise: {}, later rounds"
    yield adaptive("noise of the first clip norm", scale=lambda bound: C), later.format(sd[7:])
    yield (
        adaptive(
            "noise of the round before, negated",
            of_round=lambda seed, i: gaussian([seed, i // 2], 0) * (-1) ** i,
        ),
        later.format("independence of entries"),
    )
    yield (
        adaptive(
            "NaN in the clip norm",
            clean=lambda rows: rows,
            below=lambda norms: np.minimum(norms, 1),
            sign=1.0,
        ),
        "contribution: clip norm after rows that are not finite",
    )
    following = "noise: clip norm of the next round"
    yield adaptive("an exact count", count_stddev=0), following
    yield adaptive("hardly any noise of the count", count_stddev=1e-6), following
    yield adaptive("a third of the noise of the count missing", count_stddev=0.33), following
    yield (
        adaptive("a count that one row decides", below=lambda norms: ROWS * (norms <= 1).all()),
        following,
    )
    yield Sampling("every second cohort", _cohort_again, FixedSize(UNITS, DRAWN)), in_a_row
    yield Sampling("one order for all epochs", _one_order, Shuffled(UNITS, DRAWN)), in_a_row
    yield training("no noise in an empty round", SPARSE, is_skipped=True), sd
    yield masking("masks of half of the entries", stream=_halves), "masks: unrelated"
    yield masking("masks that overlap", stream=_shifted), "masks: unrelated"
    entries, seeds = "noise: independence of entries", "noise: independence of seeds"
    yield aggregation("noise of one norm", noise=_on_a_sphere), entries
    yield aggregation("noise of 12 bits", noise=_of_12_bits), "noise: repeated numbers"
    yield (
        aggregation("noise negated later", noise=lambda s, r: gaussian(s // 2, r) * (-1) ** s),
        "noise: repeated numbers",
    )
    yield aggregation("seeds of 16 bits", noise=lambda s, r: gaussian(s % 2**16, r)), seeds
    yield aggregation("an entry without noise at times", noise=_an_entry_at_times), sd
    yield aggregation("noise cut off at three deviations", noise=_cut_off_at_3), reply
    yield aggregation("noise of a large row", noise=_of_a_large_row()), reply
    yield (
        aggregation(
            "rows a little too long",
            bound=lambda r: np.where(
                np.linalg.norm(r, axis=1, keepdims=True) > 1.5 * C, clip(r), r
            ),
        ),
        "contribution: size of a row",
    )
    yield (
        adaptive(
            "noise of every third round",
            of_round=lambda seed, i: np.random.default_rng([seed, i % 3]).normal(0, S, SIZE),
        ),
        "noise: independence of rounds",
    )
    poissons, fixes = Poisson(UNITS, rate), FixedSize(UNITS, DRAWN)
    pairs = "sampling: pairs of units"
    yield Sampling("a largest round", rounds_of(lambda rng: poisson(rng)[:14]), poissons), size
    yield Sampling("a unit drawn as another", rounds_of(_as_another), poissons), pairs
    yield Sampling("one of each stratum", rounds_of(_strata), fixes), pairs
    yield (
        Sampling(
            "cohorts of five rounds before",
            lambda rounds, seed: [
                fixed(np.random.default_rng([seed, i % 5])) for i in range(rounds)
            ],
            fixes,
        ),
        in_a_row,
    )
    yield (
        Sampling(
            "seeds in pairs", lambda rounds, seed: rounds_of(poisson)(rounds, seed // 2), poissons
        ),
        "sampling: seeds",
    )
    yield (
        Accounting("a round too few", lambda t, d: full(t - 1, d) if t > 1 else 0.0, ACCOUNTED),
        "accounting: one round",
    )
    mean = "attack: mean of a round"
    yield training("momentum of units", momentum=0.9), mean
    yield training("drawn more often", rate=0.75), mean
    yield masking("masks of drop-outs again", renews=False), "masks: unrelated"
    yield masking("masks negated in the next round", stream=_negated), "masks: unrelated"
