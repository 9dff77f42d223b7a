"""The metric that evaluations release with noise, and what goes with it."""

from fedjax_dp.core import checks
from fedjax_dp.engine.evaluation import Evaluator
from fedjax_dp.evaluation.noised import NoisedAccuracy
from fedjax_dp.experiment.components.callbacks import followed
from fedjax_dp.experiment.components.keeping import KEY as KEEP
from fedjax_dp.experiment.components.keeping import kept_metric
from fedjax_dp.experiment.components.measured import RELEASED
from fedjax_dp.experiment.components.schedules import plateaus_of
from fedjax_dp.experiment.schema.config import (
    Config,
    CorrelatedGaussianLevel,
    DiscreteGaussianLevel,
    GaussianLevel,
    ObliviousLevel,
)
from fedjax_dp.models.base import Model

_KEY = "evaluation.noise_multiplier"
# Noise whose server sees no contribution, or whose rounds are analysed together.
_OTHER_NOISE = DiscreteGaussianLevel, ObliviousLevel, CorrelatedGaussianLevel


def noised_accuracy_of(config: Config) -> NoisedAccuracy | None:
    """Returns the release after each evaluation; None without any."""
    noise = config.evaluation.noise_multiplier
    return None if noise is None else NoisedAccuracy(noise, config.run.evaluate_every)


def followed_in_rows(config: Config) -> dict[str, str]:
    """Returns by key the metrics of rows that decide something, besides the kept round."""
    plateaus = plateaus_of(config).items()
    of_plateaus = {f"schedules.{key}.metric": rule.metric for key, rule in plateaus}
    return of_plateaus | followed(config.run.callbacks)


def check_noised(config: Config) -> None:
    """Refuses noised evaluations of clients whom no trusted server, or none alone, protects."""
    noise, privacy, section = config.evaluation.noise_multiplier, config.privacy, config.run
    if noise is None:
        return
    level = privacy.client
    is_central = not isinstance(level, _OTHER_NOISE) and not level.is_realised
    for fits, rule in (
        (privacy.unit == "client", "without privacy.unit = 'client'"),
        (is_central, "without a privacy.client.mechanism of a server that sees updates"),
        (config.secure_aggregation.form is None, "with secure_aggregation, which hides updates"),
        (config.execution.coordinator is None, "with several processes"),
        (section.evaluate_every <= section.rounds, "with run.evaluate_every above run.rounds"),
    ):
        checks.require(fits, _KEY, f"be none {rule}", noise)


def check_followed(config: Config) -> None:
    """Refuses to follow a released metric in a run that does not release it."""
    level = config.privacy.client
    is_adaptive = isinstance(level, GaussianLevel) and level.adaptive_clipping
    is_on = {"privacy.client.adaptive_clipping": is_adaptive}
    is_on[_KEY] = config.evaluation.noise_multiplier is not None
    for key, metric in {KEEP: kept_metric(config.run), **followed_in_rows(config)}.items():
        if metric is not None and metric in RELEASED:
            rule = f"be an exact metric without {RELEASED[metric]}, which releases it"
            checks.require(is_on[RELEASED[metric]], key, rule, metric)


def check_evaluated(config: Config, model: Model, evaluator: Evaluator) -> None:
    """Refuses noised evaluations without accuracies that depend on one shared model each."""
    noise = config.evaluation.noise_multiplier
    if noise is None:
        return
    for fits, rule in (
        (evaluator.clients is not None, "where clients have no test data"),
        (not evaluator.is_personal, "where clients choose or have models of their own"),
        (model.correct_fn is not None, "for a model without accuracy"),
        # Batch normalisation keeps statistics, and evaluates each example by them alone.
        (not model.mixes_examples or bool(model.buffer_keys), "for a model that mixes rows"),
    ):
        checks.require(fits, _KEY, f"be none {rule}", noise)
