"""Optax schedules inside a client's optimiser, which begin anew in each round."""

import warnings

import optax
import pytest
from small_problem import make_model

from fedjax_dp.clients import LocalConfig, local_trainer

COSINE = optax.cosine_decay_schedule(0.1, 10)
WITH = {
    "the rate of sgd": lambda rate: optax.sgd(COSINE),
    "in a chain": lambda rate: optax.chain(optax.clip(1.0), optax.adam(COSINE)),
    "its own transform": lambda rate: optax.chain(
        optax.scale_by_schedule(COSINE), optax.scale(-1.0)
    ),
    "an injected number": lambda rate: optax.inject_hyperparams(optax.sgd)(learning_rate=COSINE),
    "inside an injected one": lambda rate: optax.inject_hyperparams(
        lambda scale: optax.chain(optax.scale_by_schedule(COSINE), optax.scale(scale))
    )(scale=-1.0),
}
WITHOUT = {
    "sgd": optax.sgd,
    "adam": optax.adam,
    "an injected number": lambda rate: optax.inject_hyperparams(optax.sgd)(learning_rate=rate),
}


def _build(optimizer):
    return local_trainer(make_model(), LocalConfig(), optimizer=optimizer)


@pytest.mark.parametrize("name", WITH)
def test_a_schedule_of_optax_warns_and_names_the_key_to_use(name):
    with pytest.warns(
        UserWarning, match=r"begins anew.*schedules\.training\.learning_rate"
    ) as all_:
        _build(WITH[name])
    assert len(all_) == 1 and all_[0].filename == __file__


@pytest.mark.parametrize("name", WITHOUT)
def test_other_optimisers_do_not_warn(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _build(WITHOUT[name])
