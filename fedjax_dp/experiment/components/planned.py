"""How many participations of a client the noise on its records is calibrated for."""

from fedjax_dp.core import checks
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.wrappers import budgets
from fedjax_dp.experiment.schema.config import Config, RecordLevel
from fedjax_dp.experiment.schema.constraints import keyed

KEY = "privacy.record.planned_participations"
_PARTS = ("participation", "aggregator")


def planned_of(level: RecordLevel, participation: Participation, num_rounds: int) -> int | None:
    """Returns the number: as configured, or a quantile of the sampler's law; None for all."""
    planned = level.planned_participations
    if planned is None:
        return None
    share = share_of(level)
    if share is None:
        return int(planned)
    # A run of few rounds may draw most clients in none.
    return max(1, participation.quantile_of_draws(share, num_rounds))


def share_of(level: RecordLevel) -> float | None:
    """Returns the probability of a quantile; None for a number."""
    planned = level.planned_participations
    return float(planned[1:]) if isinstance(planned, str) else None


def check_planned(config: Config, participation: Participation) -> None:
    """Refuses a number of participations that no run has, or that has no effect or no guarantee."""
    level, units = config.privacy.record, config.privacy.units
    planned = level.planned_participations
    if "record" not in units or planned is None:
        return
    noise = level.noise_multiplier
    rule = "be left out with privacy.record.noise_multiplier, which leaves nothing to calibrate"
    checks.require(noise is None, KEY, rule, planned)
    most = -(-config.run.rounds // participation.separation)
    rule = f"be at most {most}, the rounds of a client in run.rounds = {config.run.rounds}"
    checks.require(isinstance(planned, str) or planned <= most, KEY, rule, planned)
    with keyed("", {part: f"{KEY} must be left out: its {part}" for part in _PARTS}):
        budgets.check_cohorts(participation.sampler.charges_all, "client" in units)
        budgets.check_masks(config.secure_aggregation.form is not None)
