"""Masks: whether they cancel, with drop-outs too, and whether messages are uniform."""

import math
from collections.abc import Iterator

import numpy as np
from scipy import stats

from fedjax_dp.audit.conformance.findings import Draws, Finding, Test, judged
from fedjax_dp.audit.conformance.subjects import (
    Array,
    Masking,
    MaskSource,
    Misbehaviour,
    array_of,
    called,
)

_BINS = 16
_FINDINGS = 2


def check_masks(subject: Masking, draws: Draws, significance: float) -> Iterator[Finding]:
    """Masks values of several kinds; tests sums, and messages alone and in differences."""
    claim, name, share = subject.claim, subject.name, significance / _FINDINGS
    shape, m = (claim.clients, claim.size), claim.modulus
    values = {
        "zeros": np.zeros(shape, np.int64),
        "the largest values": np.full(shape, m - 1, np.int64),
        "any values": draws.rng.integers(0, m, shape),
    }
    for dropped in range(claim.dropped + 1):
        check = "masks: sum" if dropped == 0 else f"masks: sum, {dropped} dropped out"
        yield _sums(subject, check, values, dropped, draws)
    everyone = np.ones(claim.clients, bool)
    asked = {what: (values[what], everyone) for what in ("zeros", "the largest values")}
    if claim.dropped:
        stay = np.arange(claim.clients) >= claim.dropped
        asked[f"zeros with {claim.dropped} dropped out"] = values["zeros"], stay
    messages = {}
    try:
        for what, (given, stay) in asked.items():
            # At least twenty numbers in each bin.
            seeds = draws.block(max(draws.count, -(-20 * _BINS // claim.size)))
            drawn = [_masked(subject, given, ~stay, s)[0][stay] for s in seeds]
            messages[what] = np.stack(drawn)
    except Misbehaviour as wrong:
        yield Finding(name, "masks: uniform", "failed", f"the subject {wrong}")
        return
    yield _uniform(subject, messages, share)
    yield _unrelated(subject, messages, share)


def _masked(subject: Masking, values: Array, is_dropped: Array, seed: int) -> tuple[Array, Array]:
    """Calls the subject, and requires integers from 0 to m − 1 of the right shapes."""
    answer = called(subject.mask, values, is_dropped, seed)
    claim = subject.claim
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise Misbehaviour("does not return messages and their sum")
    messages, total = map(array_of, answer)
    shape, m = (claim.clients, claim.size), claim.modulus
    return _integers("messages", messages, shape, m), _integers("the sum", total, shape[1:], m)


def _integers(what: str, array: Array, shape: tuple[int, ...], modulus: int) -> Array:
    """Requires integers from 0 to m − 1 of a shape."""
    if array.dtype.kind not in "iu" or array.shape != shape:
        form = f"{what} as {array.dtype} of shape {array.shape}"
        raise Misbehaviour(f"returns {form}, not integers of shape {shape}")
    if int(array.min()) < 0 or int(array.max()) >= modulus:
        raise Misbehaviour(f"returns {what} outside 0 to {modulus} − 1")
    return array.astype(np.int64)


def _sums(
    subject: Masking, check: str, values: dict[str, Array], dropped: int, draws: Draws
) -> Finding:
    """Compares sums with those of the values of the clients that stay."""
    claim, name = subject.claim, subject.name
    for what, given in values.items():
        for seed in draws.block(4):
            gone = draws.rng.choice(claim.clients, dropped, replace=False)
            is_dropped = np.isin(np.arange(claim.clients), gone)
            example = (
                f"values: {what}; is_dropped = np.isin(np.arange({claim.clients}), "
                f"{sorted(gone.tolist())}); seed = {seed}"
            )
            try:
                _, total = _masked(subject, given, is_dropped, seed)
            except Misbehaviour as wrong:
                return Finding(name, check, "failed", f"the subject {wrong}", example=example)
            expected = np.zeros(claim.size, np.int64)
            for row in given[~is_dropped]:
                expected = (expected + row) % claim.modulus
            off = int(np.sum(total != expected))
            if off:
                sentence = f"{off} of {claim.size} entries of the sum are wrong"
                return Finding(name, check, "failed", sentence, off, 0.0, 1.0, example)
    return Finding(name, check, "passed", "sums are those of the values", 0.0, 0.0)


def _bin_tests(numbers: Array, modulus: int, what: str) -> list[Test]:
    """Tests whether integers are uniform modulo m, by their highest and their lowest bits."""
    flat = numbers.ravel()
    # Where each bin begins, exactly.
    edges = np.array([-(-modulus * i // _BINS) for i in range(_BINS + 1)], np.int64)
    high = np.diff(np.searchsorted(np.sort(flat), edges))
    low = np.bincount(flat % _BINS, minlength=_BINS)
    residues = np.array([(modulus - i - 1) // _BINS + 1 for i in range(_BINS)])
    tests = []
    for part, counts, sizes in (("highest", high, np.diff(edges)), ("lowest", low, residues)):
        expected = sizes / modulus * flat.size
        p_value = float(stats.chisquare(counts, expected).pvalue)
        fullest = float(np.max(counts / expected)) / _BINS
        text = f"the share of the fullest of {_BINS} bins of the {part} bits of {what}"
        tests.append(Test(p_value, text, fullest, 1 / _BINS))
    return tests


def _uniform(subject: Masking, messages: dict[str, Array], share: float) -> Finding:
    """Tests the messages of each client, of zeros and of the largest values."""
    claim = subject.claim
    tests = [
        test
        for what, drawn in messages.items()
        # The last clients stay.
        for client, sent in enumerate(drawn.swapaxes(0, 1), claim.clients - drawn.shape[1])
        for test in _bin_tests(sent, claim.modulus, f"messages of client {client} for {what}")
    ]
    says = "the messages of every client are uniform"
    return judged(subject.name, "masks: uniform", tests, share, says)


def _unrelated(subject: Masking, messages: dict[str, Array], share: float) -> Finding:
    """Tests differences of messages, of two seeds, clients and entries, and equal integers."""
    check, m, tests = "masks: unrelated", subject.claim.modulus, []
    for what, drawn in messages.items():
        distinct = len(np.unique(drawn.reshape(len(drawn), -1), axis=0))
        # A client's message is uniform, whatever those of the others are.
        chance = math.comb(len(drawn), 2) / float(m) ** subject.claim.size
        if distinct < 0.9 * len(drawn) or (distinct < len(drawn) and chance <= share):
            sentence = f"{len(drawn)} seeds draw {distinct} different masks, for {what}"
            return Finding(subject.name, check, "failed", sentence, distinct, len(drawn))
        # Pairs that share nothing, so that the differences of independent masks are independent.
        first, last = drawn[:, 0], subject.claim.size // 2 * 2
        pairs = {"seeds": first[1::2] - first[: len(first) // 2 * 2 : 2]}
        pairs["seeds, one later,"] = first[2::2] - first[1:-1:2]
        pairs |= {
            f"clients {i} and {i + 1}": drawn[:, i + 1] - drawn[:, i]
            for i in range(drawn.shape[1] - 1)
        }
        if last:
            pairs["entries"] = first[:, 1:last:2] - first[:, :last:2]
        for where, gap in pairs.items():
            tests += _bin_tests(gap % m, m, f"differences of messages of {where} for {what}")
        tests.append(_equal(drawn, m))
    says = "differences of messages of seeds, clients and entries are uniform"
    return judged(subject.name, check, tests, share, says)


def _equal(drawn: Array, modulus: int) -> Test:
    """Tests how many integers of two seeds' messages are equal, wherever they are."""
    numbers = np.sort(drawn[: len(drawn) // 2 * 2].reshape(len(drawn) // 2, -1), axis=1)
    pairs = len(numbers) * math.comb(numbers.shape[1], 2)
    # At most the equal pairs, which are pairwise independent.
    equal = int(np.sum(numbers[:, 1:] == numbers[:, :-1]))
    p_value = float(stats.binom.sf(equal - 1, pairs, 1 / modulus))
    return Test(p_value, "the share of equal pairs of integers", equal / pairs, 1 / modulus)


def check_source(subject: MaskSource, draws: Draws, significance: float) -> Iterator[Finding]:
    """Draws masks, and tests their bits and whether some are equal."""
    claim, name, share = subject.claim, subject.name, significance / _FINDINGS
    try:
        drawn = array_of(called(subject.draw, claim.count, draws.block(1)[0]))
        drawn = _integers("masks", drawn, (claim.count, claim.size), claim.modulus)
    except Misbehaviour as wrong:
        yield Finding(name, "masks: uniform", "failed", f"the subject {wrong}")
        return
    tests = _bin_tests(drawn, claim.modulus, "masks")
    yield judged(name, "masks: uniform", tests, share, "masks are uniform")
    yield _repeated(subject, drawn, share)


def _repeated(subject: MaskSource, drawn: Array, share: float) -> Finding:
    """Tests the number of equal pairs of masks, which shows how many bits their seeds have."""
    claim, check = subject.claim, "masks: repeated"
    copies = np.unique(drawn, axis=0, return_counts=True)[1].astype(float)
    equal, pairs = float(np.sum(copies * (copies - 1) / 2)), claim.count * (claim.count - 1) / 2
    expected = pairs / float(claim.modulus) ** claim.size
    # By Markov's inequality.
    p_value = min(1.0, expected / equal) if equal else 1.0
    most = math.log2(pairs / -math.log(share))
    says = f"no seeds of fewer than {most:.1f} bits: {equal:.0f} of {pairs:.3g} pairs are equal"
    if p_value <= share:
        bits = math.log2(pairs / equal)
        says = (
            f"{equal:.0f} of {pairs:.3g} pairs of masks are equal, as of seeds of {bits:.1f} bits"
        )
        return Finding(subject.name, check, "failed", says, equal, expected, 1 - share)
    if expected >= share:
        says = "masks of so few bits are equal by chance, which shows nothing about their seeds"
        return Finding(subject.name, check, "open", says, equal, expected, 1 - share)
    return Finding(subject.name, check, "passed", says, equal, expected, 1 - share)
