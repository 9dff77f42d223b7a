"""Accounting: an ε that is stated, against a lower and an upper bound on the true one."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import dp_accounting as dpa
from dp_accounting.pld import privacy_loss_distribution as pld

from fedjax_dp.audit.conformance.claims import (
    FixedSize,
    Poisson,
    Release,
    Shuffled,
    Training,
    WithReplacement,
)
from fedjax_dp.audit.conformance.findings import Finding
from fedjax_dp.audit.conformance.subjects import Accounting, Misbehaviour, numbers
from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.events import UnsupportedEvent

_INTERVAL = 1e-3
# Where there is hardly any noise: shares of the losses of a round, and of a training.
_ROUND_SHARE, _SHARE = 1e-4, 1e-6
# What discretisation of both bounds may differ by.
_TOLERANCE = 0.01


class Bounds(NamedTuple):
    """Bounds on the true ε; the upper one is infinite where no analysis is known."""

    lower: float
    upper: float


def epsilon_bounds(claim: Training, rounds: int, dp_delta: float) -> Bounds:
    """Bounds the ε of rounds of a training.

    The lower bound is that of one pair of neighbours: the others contribute nothing, and a unit the
    most that it may. The upper one is the least of our ledger's and dp-accounting's.
    """
    if claim.release.noise_stddev == 0:
        return Bounds(math.inf, math.inf)
    return Bounds(_lower(claim, rounds, dp_delta), epsilon_above(claim, rounds, dp_delta))


def _loss(release: Release, rate: float, rounds: int) -> pld.PrivacyLossDistribution:
    """An optimistic privacy loss distribution of a round in which a unit is drawn at a rate."""
    strength = release.sensitivity / release.noise_stddev
    losses = strength**2 / 2 + strength
    share = max(_ROUND_SHARE, _SHARE * rounds * rate)
    options: dict[str, Any] = {
        "pessimistic_estimate": False,
        "use_connect_dots": False,
        "value_discretization_interval": max(_INTERVAL, share * losses),
        "sampling_prob": rate,
        # If a unit is drawn at random, the pair of its row and of zeros, which are neighbours too.
        "sensitivity": release.sensitivity if rate == 1 else release.clip_norm,
    }
    if release.law == "laplace":
        return pld.from_laplace_mechanism(release.noise_stddev / math.sqrt(2), **options)
    return pld.from_gaussian_mechanism(release.noise_stddev, **options)


def _lower(claim: Training, rounds: int, dp_delta: float) -> float:
    rate = claim.sampling.rate
    if isinstance(claim.sampling, Shuffled):
        rounds, batches = _epochs(claim.sampling, rounds)
        if batches > 1:
            return 0.0
        # With one batch an epoch there is no order that could protect.
        rate = 1.0
    loss = _loss(claim.release, rate, rounds).self_compose(rounds)
    return float(loss.get_epsilon_for_delta(dp_delta))


def _epochs(sampling: Shuffled, rounds: int) -> tuple[int, int]:
    """Epochs, begun ones included, and full batches of each."""
    batches = sampling.num_units // sampling.size
    return -(-rounds // batches), batches


def epsilon_above(claim: Training, rounds: int, dp_delta: float) -> float:
    """The least proven ε of rounds of a training; infinite without an analysis."""
    release, sampling = claim.release, claim.sampling
    multiplier = release.noise_stddev / release.clip_norm
    event: dpa.DpEvent = dpa.GaussianDpEvent(multiplier)
    if release.law == "laplace":
        event = dpa.LaplaceDpEvent(multiplier / math.sqrt(2))
    match sampling:
        case Poisson():
            event = dpa.PoissonSampledDpEvent(sampling.rate, event) if sampling.rate < 1 else event
        case FixedSize() if sampling.rate < 1:
            size, units = sampling.size, sampling.num_units
            event = dpa.SampledWithoutReplacementDpEvent(units, size, event)
        case WithReplacement():
            # A unit may be drawn several times.
            return math.inf
        case Shuffled():
            # Without a unit that is there, the others would be in other batches.
            if release.relation == "add_remove":
                return math.inf
            rounds, _ = _epochs(sampling, rounds)
    least = math.inf
    for accountant in ("pld", "rdp"):
        ledger = Ledger("record", release.relation)
        try:
            ledger.charge(event, count=rounds)
            least = min(least, float(ledger.epsilon(dp_delta, accountant)[0]))
        except UnsupportedEvent:
            continue
    return least


def check_accounting(subject: Accounting) -> Iterator[Finding]:
    """Compares the ε that is stated for the training with bounds, at other δ and numbers of rounds.

    A stated ε below the lower bound is wrong. Between the bounds, nothing here proves it.
    """
    claim, name = subject.claim, subject.name
    questions = {
        "accounting: epsilon": (claim.rounds, claim.dp_delta),
        "accounting: one round": (1, claim.dp_delta),
        "accounting: rounds": (4 * claim.rounds, claim.dp_delta),
        "accounting: delta": (claim.rounds, claim.dp_delta / 100),
    }
    for check, (rounds, dp_delta) in questions.items():
        what = f"ε of {rounds} rounds at δ = {dp_delta:.3g}"
        example = f"epsilon({rounds}, {dp_delta!r})"
        try:
            stated = float(numbers((), subject.epsilon, rounds, dp_delta))
        except Misbehaviour as wrong:
            yield Finding(name, check, "failed", f"the subject {wrong}", example=example)
            continue
        lower, upper = epsilon_bounds(claim, rounds, dp_delta)
        if not stated >= lower * (1 - _TOLERANCE):
            sentence = f"{what} is stated as {stated:.4g} and is at least {lower:.4g}"
            yield Finding(name, check, "failed", sentence, stated, lower, 1.0, example)
        elif stated < upper * (1 - _TOLERANCE):
            known = "no analysis is known here" if math.isinf(upper) else f"{upper:.4g} is proven"
            sentence = f"{what} is stated as {stated:.4g}: not below {lower:.4g}, but {known}"
            yield Finding(name, check, "open", sentence, stated, upper)
        else:
            loose = stated / upper if upper > 0 else 1.0
            sentence = f"{what} is stated as {stated:.4g}; {upper:.4g} is proven"
            if loose > 1 + _TOLERANCE:
                sentence += f", so that it is loose by a factor of {loose:.3g}"
            yield Finding(name, check, "passed", sentence, stated, upper)
