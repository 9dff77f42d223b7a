"""Under JAX's strict promotion of types rounds are traced as they are without it."""

import jax
import numpy as np
import pytest
from cases import CASES
from marks import later, slow, telling
from run_folders import in_subprocess
from small_problem import make_model

from fedjax_dp.data import sampling
from fedjax_dp.engine import examples_of, federation
from fedjax_dp.engine.cohort import traced
from fedjax_dp.engine.facts import population_of

QUICK = ("fedavg", "propfair", "ae_dpfl", "trimmed_mean", "km_cdpfl", "gma", "dp_sgd")


@pytest.mark.parametrize("name", later(CASES, but=QUICK, mark=telling))
def test_rounds_promote_no_type_implicitly(name):
    case = CASES[name]
    data, validation = case.data(), case.validation()
    with jax.numpy_dtype_promotion("strict"):
        population = population_of(data, validation)
        fed = federation(case.make(make_model()), population, case.participation())

        def first_round(key, examples, hyper):
            return fed.run_round(fed.init(key), hyper, examples, key)

        examples, hyper = examples_of(data, validation), traced(fed.algorithm, fed.hyper)
        state, _, _ = jax.eval_shape(first_round, jax.random.key(0), examples, hyper)
    assert state.round.dtype == np.int32


SAMPLERS = {
    "poisson": sampling.poisson(),
    "truncated": sampling.poisson(8),
    "fixed_size": sampling.fixed_size(),
    "shuffled": sampling.shuffled(),
    "cyclic": sampling.cyclic(),
    "min_separated": sampling.min_separated(2),
}


@pytest.mark.parametrize("limit", [40, 5000])
@pytest.mark.parametrize("name", SAMPLERS)
def test_draws_promote_no_type_implicitly(name, limit):
    sampler = SAMPLERS[name]
    capacity, start = sampler.capacity(limit, 4), sampler.init(limit)
    batch = np.float32(4) if sampler.varies else np.int32(4)

    def draw(key, step, size, batch):
        _, drawn = sampler.draw(start, key, step, size, batch, limit, capacity)
        return drawn, sampler.num_steps_per_epoch(size, batch)

    with jax.numpy_dtype_promotion("strict"):
        one = np.int32(30)
        drawn, _ = jax.eval_shape(draw, jax.random.key(0), one, one, batch)
    assert drawn.indices.dtype == np.int32


@slow
def test_a_run_is_the_same_run(tmp_path, monkeypatch):
    found = []
    for promotion in ("standard", "strict"):
        monkeypatch.setenv("JAX_NUMPY_DTYPE_PROMOTION", promotion)
        folder = tmp_path / promotion
        ended = in_subprocess("run", "--run.rounds=1", "--output", str(folder))
        assert ended.returncode == 0, ended.stderr
        found.append((folder / "metrics.jsonl").read_text("utf-8"))
    assert found[0] == found[1]
