"""Noise on a regularised minimiser: its sensitivity, the noise of each kind, and the event."""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.clients.base import LocalConfig, LocalTrainer
from fedjax_dp.clients.training_loop import TrainingLoop
from fedjax_dp.core import checks, products, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.decimals import rounded_down, rounded_up
from fedjax_dp.core.ranges import Count, HalfFraction, NonNegative, Positive
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.models.dense import LossBounds, loss_bounds
from fedjax_dp.privacy import events
from fedjax_dp.privacy.mechanisms import mechanism as mechanisms
from fedjax_dp.privacy.mechanisms import noise, random_bits
from fedjax_dp.privacy.mechanisms.gamma_shares import (
    GammaSharesDpEvent,
    draw_shares,
    minimizer_sensitivity,
)
from fedjax_dp.privacy.mechanisms.noise import BoundedLaplaceDpEvent, StaircaseDpEvent

Mechanism = Literal["laplace", "gaussian", "bounded_laplace", "staircase", "gamma_shares"]
Calibration = Literal["corrected", "paper", "released"]
# Noise whose scale may be that of another sensitivity: what it is worth is then known.
_SCALED = ("laplace", "gaussian", "gamma_shares")
# No gradient that can be summed is as long.
_NO_CLIPPING = 2.0**100
# Rounding errors of the bound itself, and of entries on a lattice, are at most this share of it.
_MARGIN = 2.0**-10
# Gradients that are summed before the sum is compensated.
_SUMMED = 64
# Roundings of a record's gradient beside those of sums: a softmax, its residual, a row, factors.
_ROUNDINGS = 32
# Steps of at most this share of the largest one bring models closer whatever their rounding.
_SHORTER = 1 - 2.0**-20
# Units of the lattice in a bound, log2.
_LATTICE_BITS = 12


class MinimizerNoise(NamedTuple):
    """Noise on the parameters that training on all records of a client ends with.

    Noise multipliers are measured in c = B/(k·α): what one record adds to the parameters, in L2
    norm, for k records, a regulariser α and gradients of norm at most B. 1/multiplier is the ε of
    one coordinate under zero-out, but of Gaussian noise, where it is the standard deviation over c.
    """

    mechanism: Mechanism
    # Of the loss of every record; a curvature of inf if none is known, and what noise is made for
    # in the place of the gradient.
    bounds: LossBounds
    regularizer: float  # α of training.
    noise_regularizer: float | None  # α that released noise is made for; None for that of training.
    num_entries: int  # The number of parameters.
    num_layers: int  # The number of arrays that hold them.
    num_outputs: int  # The number of logits.
    # The clients whose shares of the noise are summed; 1 if each client's own noise protects it.
    num_parties: int
    least_multiplier: float  # Of all clients, for noise in shares.
    entry_delta: float  # δ of one entry, for bounded Laplace noise.
    divisor: int  # What printed and released noise is divided by, 1 if it is corrected.

    @property
    def is_bounded(self) -> bool:
        """Whether a bound on what a record adds is known."""
        return self.regularizer > 0 and math.isfinite(self.bounds.curvature)

    @property
    def max_learning_rate(self) -> float:
        """The largest step under which a step brings two models closer together."""
        return _SHORTER * 2 / (self.bounds.curvature + 2 * self.regularizer)

    @property
    def min_learning_rate(self) -> float:
        """The smallest rate above 0 whose steps are not lost in parameters of two floats."""
        return 2.0**-24 / self.regularizer

    def training(self, trainer: LocalTrainer) -> LocalTrainer:
        """Returns a trainer whose rounding errors are bounded, if anything is."""
        if not self.is_bounded:
            return trainer
        assert isinstance(trainer.train, TrainingLoop)
        return trainer.train.compensated(_SUMMED).trainer(trainer.config)

    def training_numbers(self, config: LocalConfig) -> LocalConfig:
        """Returns numbers without clipping, as clipped gradients need not be those of any loss."""
        if not self.is_bounded:
            unclipped = jnp.float32(_NO_CLIPPING)
            return config._replace(clip_norm=unclipped, noise_multiplier=jnp.float32(0))
        rate = jnp.minimum(config.learning_rate, self.max_learning_rate)
        return config._replace(
            learning_rate=jnp.where(rate > 0, jnp.maximum(rate, self.min_learning_rate), 0.0),
            clip_norm=jnp.float32(self.bounds.gradient * math.sqrt(self.num_layers)),
            noise_multiplier=jnp.float32(0),
        )

    def contribution(self, size: Any, start_norm: Any = 0.0) -> jax.Array:
        """Bounds what one of `size` records adds to the parameters, in L2 norm, with rounding.

        (B/k + 2E)/α for the bound E on the rounding errors of one step from a start of norm
        `start_norm`, see `minimizer_noise`; both may be traced.
        """
        return self._with_rounding(size, self.step_error(start_norm))

    def _usual(self, size: Any) -> jax.Array:
        """Computes that bound for a start at zero and exact products, whatever is traced."""
        return self._with_rounding(size, self.step_error(0.0, products.EXACT))

    def _with_rounding(self, size: Any, error: jax.Array) -> jax.Array:
        bound = self._of_minimizer(size, self.regularizer) + 2 * error / self.regularizer
        return bound * (1 + _MARGIN)

    def _of_minimizer(self, size: Any, regularizer: float) -> jax.Array:
        """Computes B/(k·α)."""
        one = minimizer_sensitivity(1, regularizer, lipschitz=self.bounds.gradient)
        return jnp.float32(one.contribution) / jnp.maximum(jnp.asarray(size, jnp.float32), 1.0)

    def scale(self, size: Any, start_norm: Any = 0.0) -> jax.Array:
        """Computes what noise is proportional to: the bound, or B/(k·α) for the α it is made for.

        Released noise grows with the bound for far starts and split products, which an event does
        not know.
        """
        if self.noise_regularizer is None:
            return self.contribution(size, start_norm)
        printed = self._of_minimizer(size, self.noise_regularizer)
        if not self.is_bounded:
            return printed
        return printed * (self.contribution(size, start_norm) / self._usual(size))

    def step_error(self, start_norm: Any, error: products.Rounding | None = None) -> jax.Array:
        """Bounds the rounding errors of a step over its learning rate, E."""
        error, alpha = error or products.rounding(), self.regularizer
        gradient, curvature = self.bounds
        # No step leads beyond the larger of the two.
        longest = jnp.maximum(jnp.float32(start_norm), gradient / alpha)
        inputs, outputs = self.num_entries / self.num_outputs, self.num_outputs
        of_logits = (inputs + math.sqrt(outputs) + 2) * error.per_addition + error.per_product
        of_sums = (outputs + _SUMMED + _ROUNDINGS) * error.per_addition + error.per_product
        of_gradient = curvature * longest * of_logits + gradient * of_sums
        return of_gradient + 12 * alpha * longest * error.per_addition

    def in_words(self, is_common: bool) -> str:
        """Writes that bound for a statement; `is_common` if noise is for the smallest client."""
        if not self.is_bounded:
            why = "training has no regulariser"
            if self.regularizer > 0:
                why = "the gradients of the model have no known bound"
            return f"unknown, since {why}"
        whose = "the smallest client" if is_common else "the client"
        bound = rounded_up(self.bounds.gradient * (1 + _MARGIN))
        rounding = rounded_up(2 * (1 + _MARGIN) * float(self.step_error(0.0)) / self.regularizer)
        return (
            f"{bound}/({rounded_down(self.regularizer)}·k) in L2 norm, for the k records of "
            f"{whose} in a round, and {rounding} or more for the rounding of its training"
        )

    def add(self, key: PRNGKey, params: PyTree, bound: Any, multiplier: Any) -> PyTree:
        """Adds noise to parameters that one record moves by `bound`; the key serves this alone."""
        count = self.num_entries
        if self.mechanism == "laplace":
            return noise.add_laplace(key, params, multiplier * bound)
        if self.mechanism == "gaussian":
            return noise.add_gaussian(key, params, multiplier * bound)
        if self.mechanism == "gamma_shares":
            leaves, treedef = jax.tree.flatten(params)
            share = 1 / self.num_parties
            draws = random_bits.like(key, leaves, lambda k, shape: draw_shares(k, shape, share))
            pairs = zip(leaves, draws, strict=True)
            noised = [noise.release(x, multiplier * bound, draw) for x, draw in pairs]
            return jax.tree.unflatten(treedef, noised)
        if self.mechanism == "staircase":
            # Noise of a smaller multiplier cannot be drawn; more of it is safe.
            least = mechanisms.SMALLEST_STAIRCASE_MULTIPLIER
            multiplier = jnp.where(multiplier > 0, jnp.maximum(multiplier, least), multiplier)
            chosen = mechanisms.staircase(bound, multiplier, num_entries=count)
            # Its steps hide moves on a lattice, where sums are exact.
            unit = jnp.ldexp(jnp.float32(1), jnp.frexp(bound)[1] - 1 - _LATTICE_BITS)
            params = jax.tree.map(lambda x: jnp.round(x / unit) * unit, params)
        else:
            chosen = mechanisms.bounded_laplace(
                bound, multiplier, num_entries=count, entry_delta=self.entry_delta
            )
        return chosen.add_noise(key, params)

    def event(self, size: int, config: LocalConfig) -> dpa.DpEvent:
        """Builds the event of one release, for a record of a client of any size."""
        if size == 0:
            return dpa.NoOpDpEvent()
        if not self.is_bounded:
            return dpa.NonPrivateDpEvent()
        multiplier = events.concrete("noise_multiplier", config.noise_multiplier)
        if self.mechanism == "gamma_shares":
            # Shares of larger scales only add noise to the sum.
            least = self.least_multiplier
            rule = (
                f"be at least {rounded_up(least, 6)}, the smallest that shares were built with: "
                "give it instead of an ε to calibrate it to"
            )
            checks.require(multiplier >= least * (1 - 1e-6), "noise_multiplier", rule, multiplier)
            multiplier = min(multiplier, least)
        multiplier /= self.divisor
        if self.noise_regularizer is not None:
            # Rounding weighs most for a round that reads all of a client's records.
            printed = self._of_minimizer(size, self.noise_regularizer)
            multiplier *= float(printed / self._usual(size))
        root = math.sqrt(self.num_entries)
        match self.mechanism:
            case "laplace":
                return dpa.LaplaceDpEvent(multiplier / root)
            case "gaussian":
                return dpa.GaussianDpEvent(multiplier)
            case "gamma_shares":
                return GammaSharesDpEvent(multiplier / root, self.num_parties)
            case "staircase":
                return StaircaseDpEvent(multiplier, self.num_entries)
            case "bounded_laplace":
                return BoundedLaplaceDpEvent(multiplier, self.num_entries, self.entry_delta)


@checked
def minimizer_noise(
    model: Model,
    trainer: LocalTrainer,
    *,
    regularizer: NonNegative,
    mechanism: Mechanism,
    num_clients: Count,
    calibration: Calibration = "corrected",
    noise_regularizer: Positive | None = None,
    entry_delta: HalfFraction = 1e-9,
) -> MinimizerNoise:
    """Calibrates noise on the parameters that full-batch training with a regulariser ends with.

    The bound c = B/(k·α) on what one record adds holds for the exact minimiser of the mean loss
    plus `α/2 ‖w‖²`, and after any number of full-batch steps of at most 2/(β + 2α) from a start
    that does not depend on the record, for losses of curvature at most β: training need not
    converge. It is in L2 norm. Laplace noise is for L1 norms, which are up to √d times as long for
    d parameters; staircase and bounded Laplace noise is for entries, which cost d times as much
    together. The events say so.

    Training in float32 rounds. A step of a rate η brings two models closer by a factor of 1 − ηα;
    a record adds ηB/k to it, and rounding at most ηE to each of the two trainings, with the record
    and without. The sum over all steps is below (B/k + 2E)/α, by which noise is scaled. With
    parameters in two floats no E grows as steps become small: of n inputs, C outputs, u = 6e-8, and
    parameters of norm at most R, the larger of the start's and B/α, it is the sum of

    - βR(n + √C + 2)u: logits are sums of n products, of which a softmax subtracts the largest, at
      the rounded parameters;
    - B(C + 64 + 32)u: a softmax over C outputs, a sum of at most 64 gradients before compensation,
      and single roundings of residuals, rows, factors and the mean;
    - 12αRu: the decay, its product with η, the rounding of the trained parameters, and the 2^-46 R
      that two floats lose in a step of η ≥ 2^-24/α.

    The trainer's numbers and clipping are used, with this noise in the place of noise on gradients.
    Shares of noise ("gamma_shares") are of one Laplace in the sum over all clients. Under "paper"
    noise is divided by `num_clients`, as printed, and the event says what that is worth. Under
    "released" its scale is besides that of another regulariser, `noise_regularizer`, and of exact
    arithmetic: z·B/(k·α)/n. The event then says what it is worth for that of training. Where
    training has none, or the model no bounds, no bound on a record is known: noise is for gradients
    of the trainer's `clip_norm`, which nothing enforces, and the event is one without privacy.

    Guarantee: one release of one client's noised parameters has `MinimizerNoise.event`, for one
    record of the client, against all who see them; with "gamma_shares" against those who see the
    sum over all clients alone. Noise is in float32, with gaps between its possible values, which no
    event covers, except for staircase noise. Before staircase and bounded Laplace noise, parameters
    beyond 2,048 c are cut off, which clients of many more than 2,048 records may reach.

    Source: Chaudhuri, Monteleoni, Sarwate 2011, algorithm 1 (output perturbation); Mugunthan and
    others 2020 (PrivacyFL) for shares of clients, whose scale is corrected.
    """
    is_released = calibration == "released"
    rule = f"be given for calibration 'released', and only then, not for {calibration!r}"
    fits = (noise_regularizer is not None) == is_released
    checks.require(fits, "noise_regularizer", rule, noise_regularizer)
    rule = f"be one of {', '.join(_SCALED)} for calibration 'released'"
    checks.require(not is_released or mechanism in _SCALED, "mechanism", rule, mechanism)
    rule = "be above 0, except for calibration 'released', which then guarantees nothing"
    checks.require(regularizer > 0 or is_released, "regularizer", rule, regularizer)
    trainer.private_claim()
    bounds = loss_bounds(model)
    if is_released and (bounds is None or regularizer == 0):
        bounds = LossBounds(float(np.max(np.asarray(trainer.config.clip_norm))), math.inf)
    rule = "be logistic_regression with a gradient_bound, on which the noise rests"
    checks.require(bounds is not None, "model", rule, model.name)
    assert bounds is not None
    if math.isfinite(bounds.curvature):
        _require_bounded(model, trainer, bounds)
    multipliers = np.asarray(trainer.config.noise_multiplier, np.float64)
    is_shared = mechanism == "gamma_shares"
    if is_shared:
        checks.whole("num_clients", num_clients, at_least=2)
    if mechanism == "staircase":
        most = mechanisms.LARGEST_STAIRCASE_MULTIPLIER
        rule = f"be at most {rounded_down(most, 6)} for staircase noise, beyond which zeros "
        rule += "would be sent"
        largest = float(np.max(multipliers))
        checks.require(largest <= most, "noise_multiplier", rule, largest)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    outputs = shapes["bias"].shape[0] if math.isfinite(bounds.curvature) else 1
    perturbation = MinimizerNoise(
        mechanism,
        bounds,
        regularizer,
        noise_regularizer,
        trees.num_parameters(shapes),
        len(jax.tree.leaves(shapes)),
        outputs,
        num_clients if is_shared else 1,
        float(np.min(multipliers)),
        entry_delta,
        1 if calibration == "corrected" else num_clients,
    )
    if perturbation.is_bounded:
        _require_rates(trainer, perturbation)
    return perturbation


def _require_bounded(model: Model, trainer: LocalTrainer, bounds: LossBounds) -> None:
    """Requires plain steps on all records, of gradients that no clipping changes."""
    trained = trainer.train.rule.model if isinstance(trainer.train, TrainingLoop) else None
    rule = "train a model with the bounds of `model`, on which the noise rests"
    fits = trained is not None and loss_bounds(trained) == loss_bounds(model)
    checks.require(fits, "trainer", rule, "one of another model")
    trainer.require_plain_sgd("the sensitivity of its result is that of plain steps")
    _require_whole_batches(trainer)
    clip_norm = float(np.min(np.asarray(trainer.config.clip_norm)))
    bound = rounded_up(bounds.gradient, 6)
    rule = f"be at least {bound}, the model's gradient_bound: clipped losses need not have the "
    rule += "sensitivity"
    checks.require(clip_norm >= bounds.gradient * (1 - 1e-6), "clip_norm", rule, clip_norm)


def _require_rates(trainer: LocalTrainer, perturbation: MinimizerNoise) -> None:
    """Requires learning rates for which the bound and its rounding hold."""
    rates = np.asarray(trainer.config.learning_rate, np.float64)
    rate, most = float(np.max(rates)), perturbation.max_learning_rate
    rule = f"be at most {rounded_down(most, 6)}, 2/(curvature + 2·regularizer), up to which the "
    rule += "sensitivity holds"
    checks.require(rate <= most * (1 + 1e-6), "learning_rate", rule, rate)
    smallest = float(np.min(rates, initial=np.inf, where=rates > 0))
    least = perturbation.min_learning_rate
    rule = f"be 0 or at least {rounded_up(least, 6)}, 2^-24/regularizer: rounding of smaller steps "
    rule += "has no bound"
    checks.require(smallest >= least * (1 - 1e-6), "learning_rate", rule, smallest)


def _require_whole_batches(trainer: LocalTrainer) -> None:
    """Requires steps on all records: one step then makes an epoch, whose event is one Gaussian."""
    (one,) = trainer.private_claim().events
    first: Mapping[str, Any] = {
        name: np.asarray(value).reshape(-1)[0]
        for name, value in trainer.config._asdict().items()
        if name != "optimizer" and value is not None
    }
    # Small enough that any other sampler needs several steps, or draws at random.
    epoch = {**first, "batch_size": 1, "num_epochs": 1, "num_steps": None}
    steps = events.flatten(one(4, trainer.config._replace(**epoch)))
    is_whole = [(type(part), count) for part, count in steps] == [(dpa.GaussianDpEvent, 1)]
    rule = "take steps on all records (sampler 'full_batch')"
    checks.require(is_whole, "trainer", rule, "one that samples batches")
