"""The configured mechanism on clients' updates, calibrated to its budget."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import dp_accounting
import jax
import numpy as np

from fedjax_dp.algorithms.base import Hyper
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.core import checks, trees
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.accounts.calibration import with_factors
from fedjax_dp.evaluation.noised import NoisedAccuracy
from fedjax_dp.experiment.schema.config import (
    BoundedLaplaceLevel,
    CentralDiscreteLevel,
    ClientLevel,
    CorrelatedGaussianLevel,
    DiscreteGaussianLevel,
    GaussianLevel,
    LaplaceLevel,
    ObliviousLevel,
    StaircaseLevel,
)
from fedjax_dp.privacy.accounting.calibration import calibrate_noise_multiplier
from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.claims import ClientClaim
from fedjax_dp.privacy.events import DpEvent
from fedjax_dp.privacy.mechanisms.clipping import make_adaptive_clipping
from fedjax_dp.privacy.mechanisms.distributed import Plan, choose_bits, make_plan
from fedjax_dp.privacy.mechanisms.mechanism import (
    LARGEST_STAIRCASE_MULTIPLIER,
    SMALLEST_STAIRCASE_MULTIPLIER,
)
from fedjax_dp.privacy.mechanisms.noise import banded_noise
from fedjax_dp.server.base import Summed
from fedjax_dp.server.oblivious import oblivious_mean
from fedjax_dp.server.parts import by_parts
from fedjax_dp.server.private import (
    adaptive_gaussian_mean,
    bounded_laplace_mean,
    by_realised_count,
    central_discrete_mean,
    correlated_gaussian_mean,
    discrete_mean,
    gaussian_mean,
    laplace_mean,
    num_shares,
    staircase_mean,
)
from fedjax_dp.server.secure import MaskGraph

Build = Callable[[float], Summed]


class Setting(NamedTuple):
    """The facts that a mechanism on updates depends on besides its numbers."""

    participation: Participation
    structure: PyTree  # Of what a private mean combines.
    num_rounds: int
    promise: dict[str, str]
    graph: MaskGraph | None = None
    max_participations: int | None = None
    factors: Mapping[str, np.ndarray] = {}  # As of `Hyper`.
    evaluations: NoisedAccuracy | None = None  # What every client pays besides rounds.

    @property
    def cohort(self) -> float:
        """The public divisor."""
        return self.participation.cohort_size

    @property
    def charged(self) -> int:
        """The rounds that the client is charged for that takes part most often."""
        rounds = self.num_rounds
        if not self.participation.sampler.charges_all:
            rounds = -(-rounds // self.participation.separation)
        return min(rounds, self.max_participations or rounds)

    def charged_factors(
        self, priced: Mapping[str, np.ndarray], noise: str
    ) -> tuple[dict[str, np.ndarray], int]:
        """Returns factors of numbers that set prices as rounds are charged, and how many are.

        Of more rounds than a client takes part in, those with the least noise are charged; all of
        them where other numbers change too.
        """
        if priced.keys() - {noise}:
            return dict(priced), self.num_rounds
        if not priced:
            return {}, self.charged
        table = priced[noise]
        whole = table[np.minimum(np.arange(self.num_rounds), len(table) - 1)]
        return {noise: np.sort(whole)}, self.charged


def client_aggregator(level: ClientLevel, setting: Setting) -> Summed:
    """Builds the private aggregator, with the given noise or that which spends the budget."""
    build, noise = _builder(level, setting), level.noise_multiplier
    mean = build(_calibrated(level, build, setting) if noise is None else noise)
    shares = getattr(level, "part_shares", None)
    if shares is not None or level.part_scales is not None:
        mean = by_parts(mean, scales=level.part_scales, shares=shares)
    return by_realised_count(mean) if level.is_realised else mean


def with_share_of_noise(level: ClientLevel, setting: Setting, share: float) -> ClientLevel:
    """Replaces the budget by a share of its noise, for audits."""
    noise = level.noise_multiplier
    if noise is None:
        noise = _calibrated(level, _builder(level, setting), setting)
    return level.model_copy(update={"noise_multiplier": share * noise, "epsilon": None})


def _calibrated(level: ClientLevel, build: Build, setting: Setting) -> float:
    # The search would try multipliers below the smallest that can be drawn, which costs less.
    least, most = 0.0, math.inf
    if isinstance(level, StaircaseLevel):
        least, most = SMALLEST_STAIRCASE_MULTIPLIER, LARGEST_STAIRCASE_MULTIPLIER

    # No price depends on a clip norm, in whose units the noise is.
    priced = {
        name: table
        for name, table in setting.factors.items()
        if name.startswith("aggregator.") and name != "aggregator.clip_norm"
    }
    factors, charged = setting.charged_factors(priced, "aggregator.noise_multiplier")
    rounds = Counter(Hyper(LocalConfig(), factors=factors).alike(charged))
    of_evaluations = _of_evaluations(level, setting)

    def run_of(noise_multiplier: float) -> Any:
        mean = build(np.clip(noise_multiplier, least, most).item())
        assert isinstance(mean.claim, ClientClaim)
        numbers, parts = Hyper(LocalConfig(), {}, mean.numbers, factors), list(of_evaluations)
        for t, count in rounds.items():
            release = mean.claim.event(numbers.at(t).aggregator)
            event = setting.participation.event(release)
            parts.append(dp_accounting.SelfComposedDpEvent(event, count))
        return dp_accounting.ComposedDpEvent(parts)

    assert level.epsilon is not None
    found = calibrate_noise_multiplier(run_of, level.epsilon, level.dp_delta, **setting.promise)
    return float(np.clip(with_factors(np.asarray(found), factors), least, most))


def _of_evaluations(level: ClientLevel, setting: Setting) -> list[DpEvent]:
    """Returns the planned releases of evaluations, which must leave a part of the budget."""
    if setting.evaluations is None:
        return []
    event = setting.evaluations.event(setting.evaluations.num_releases(0, setting.num_rounds))
    ledger = Ledger("client", setting.promise["relation"])
    ledger.charge(event)
    spent = float(np.max(ledger.epsilon(level.dp_delta, setting.promise["accountant"])))
    rule = f"leave a part of privacy.client.epsilon to rounds: its releases take {spent:.4g} of it"
    key, multiplier = "evaluation.noise_multiplier", setting.evaluations.noise_multiplier
    checks.require(level.epsilon is not None and spent < level.epsilon, key, rule, multiplier)
    return [event]


def _builder(level: ClientLevel, setting: Setting) -> Build:
    """Returns the mechanism as a function of its noise multiplier."""
    structure, cohort, clip_norm = setting.structure, setting.cohort, level.clip_norm
    match level:
        case GaussianLevel(adaptive_clipping=True):
            return _adaptive(level, cohort)
        case GaussianLevel():
            return lambda z: gaussian_mean(clip_norm, z, cohort, per_layer=level.per_layer)
        case LaplaceLevel():
            return lambda z: laplace_mean(clip_norm, z, cohort)
        case StaircaseLevel():
            return lambda z: staircase_mean(structure, clip_norm, z, cohort)
        case BoundedLaplaceLevel():
            return _bounded_laplace(level, setting)
        case DiscreteGaussianLevel():
            return _discrete(level, setting)
        case CentralDiscreteLevel():
            return lambda z: central_discrete_mean(structure, clip_norm, z, cohort)
        case CorrelatedGaussianLevel():
            return _correlated(level, setting)
        case ObliviousLevel():
            return _oblivious(level, setting)


def _adaptive(level: GaussianLevel, cohort: float) -> Build:
    def build(z: float) -> Summed:
        # The paper's choice for large cohorts; in small ones the noise of the count leaves the
        # updates three quarters of the round's cost.
        rule = make_adaptive_clipping(
            cohort,
            initial_clip_norm=level.clip_norm,
            target_quantile=level.target_quantile,
            count_stddev=max(cohort / 20, z),
        )
        return adaptive_gaussian_mean(rule, z, per_layer=level.per_layer)

    return build


def _bounded_laplace(level: BoundedLaplaceLevel, setting: Setting) -> Build:
    # Half of δ covers the truncation, in equal parts; the other half is left for ε.
    parts = 2 * trees.num_parameters(setting.structure) * setting.charged
    is_exchanged = setting.promise["relation"] == "replace_one"

    def build(z: float) -> Summed:
        group = 1 + math.exp(min(1 / z, 700.0)) if is_exchanged and z > 0 else 1.0
        entry_delta = max(level.dp_delta / parts / group, float(np.finfo(np.float32).tiny))
        return bounded_laplace_mean(
            setting.structure, level.clip_norm, z, setting.cohort, entry_delta
        )

    return build


def _discrete(level: DiscreteGaussianLevel, setting: Setting) -> Build:
    plan, structure = plans(level, setting), setting.structure
    if setting.participation.sampler.varies:
        return lambda z: discrete_mean(structure, plan(z), setting.cohort, varies=True)
    return lambda z: discrete_mean(structure, plan(z), int(setting.cohort))


def plans(level: DiscreteGaussianLevel, setting: Setting) -> Callable[[float], Plan]:
    """Returns the lattice, the noise and its shares as a function of the noise multiplier."""
    participation, size = setting.participation, trees.num_parameters(setting.structure)
    # A share from each client; the lattice is sized for as many contributions.
    cohort, graph = setting.cohort, setting.graph
    varies = participation.sampler.varies
    count = num_shares(participation.num_clients, cohort) if varies else int(cohort)
    bits = level.bits
    if bits == "auto":
        # Before the noise is known, the noise of an ordinary run.
        usual = level.noise_multiplier or 1.0
        bits = choose_bits(
            size, level.clip_norm, usual, num_clients=count, num_deviations=level.num_deviations
        )

    def build(z: float) -> Plan:
        return make_plan(
            size,
            level.clip_norm,
            z,
            num_clients=count,
            # Under masks, those of clients that may drop out are not counted on.
            num_shares=None if graph is None else graph.min_senders,
            colluders=0 if graph is None else graph.colluders,
            bits=bits,
            num_deviations=level.num_deviations,
        )

    return build


def _correlated(level: CorrelatedGaussianLevel, setting: Setting) -> Build:
    separation = max(level.bands, setting.participation.separation)
    noise = banded_noise(setting.num_rounds, level.bands, min_separation=separation)
    return lambda z: correlated_gaussian_mean(
        noise, level.clip_norm, z, setting.cohort, per_layer=level.per_layer
    )


def _oblivious(level: ObliviousLevel, setting: Setting) -> Build:
    options: dict[str, Any] = {"form": level.form, "calibration": level.calibration}
    options["self_noise"] = level.self_noise
    structure, cohort = setting.structure, int(setting.cohort)
    return lambda z: oblivious_mean(structure, level.clip_norm, z, cohort, **options)


def structure_of(model: Any) -> PyTree:
    """Computes the shapes of a model's parameters."""
    return jax.eval_shape(model.init, jax.random.key(0))
