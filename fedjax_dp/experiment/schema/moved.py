"""Keys and values that earlier versions had or that Python has, by what says the same now."""

from typing import Any

_RATE = 'schedules.training.learning_rate, such as {curve = "inverse"}'
_STEPS = f"schedules.algorithm.options.step_size or {_RATE}"
_MECHANISM = 'privacy.client.mechanism = "{}" under privacy.unit = "client"'
# By aggregator in Python; a configuration has their noise as the mechanism of clients.
_MEANS = {
    "gaussian_mean": "gaussian",
    "private_mean": "gaussian",
    "laplace_mean": "laplace",
    "staircase_mean": "staircase",
    "bounded_laplace_mean": "bounded_laplace",
    "discrete_mean": "discrete_gaussian",
    "central_discrete_mean": "central_discrete_gaussian",
    "correlated_gaussian_mean": "correlated_gaussian",
    "oblivious_mean": "oblivious",
}
_KEYS = {
    "algorithm.options.schedule": _STEPS,
    "algorithm.options.period": _STEPS,
    "training.schedule": _RATE,
    "participation.everybody_first": "participation.full_participation_first",
}
_SECAGG = "secure_aggregation.form, which sums under masks"
_VALUES = {
    "algorithm.name": {
        "dp_ftrl": f'algorithm.name = "dp_fedavg" with {_MECHANISM.format("correlated_gaussian")}',
        "secagg": _SECAGG,
    },
    "participation.sampler": {"everybody": 'participation.sampler = "full_participation"'},
    "training.sampler": {"everybody": 'training.sampler = "full_batch"'},
    "algorithm.aggregator": {
        **{name: _MECHANISM.format(mechanism) for name, mechanism in _MEANS.items()},
        "secagg": _SECAGG,
        "adaptive_gaussian_mean": "privacy.client.adaptive_clipping",
    },
}
# Numbers that were lists with one for each round.
_LISTS = {f"algorithm.options.{name}" for name in ("alpha", "beta", "gamma")}


def moved(key: str, value: Any = None) -> str:
    """Returns the end of an error that says what to use now; empty for what has not moved."""
    now = _KEYS.get(key)
    if isinstance(value, str):
        now = _VALUES.get(key, {}).get(value.lower().replace("-", "_"), now)
    elif isinstance(value, list) and key in _LISTS:
        now = f'schedules.{key} = {{curve = "list", factors = […]}} for numbers over rounds'
    return "" if now is None else f"; use {now}"
