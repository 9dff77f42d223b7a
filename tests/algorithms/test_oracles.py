"""Every algorithm against a float64 NumPy implementation that shares nothing but its draws."""

import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, quick_first
from marks import later, telling
from references import PLAIN, Reference, reference
from small_problem import KEY, NUM_MODELS, ROUNDS, SIZES, snapshot

import fedjax_dp.algorithms
from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.core.messages import SentIf


def run_of(ref: Reference):
    return ref.case.run_of(ref.initial, ref.key)


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", quick_first(CASES))
def test_three_rounds_agree_with_numpy(name):
    ref = reference(name)
    observed = ref.case.observe(ref.final)
    assert_close(observed, ref.case.expect(run_of(ref)))
    # The agreement would mean little if nothing had moved.
    start = ref.case.observe(ref.initial)
    assert max(np.abs(observed[k] - start[k]).max() for k in start) > 0.02


@telling
def test_the_problem_holds_what_makes_it_hard():
    replay = run_of(reference("fedavg")).replay
    cohorts = [replay.cohort(r) for r in range(ROUNDS)]
    assert len({len(cohort) for cohort in cohorts}) > 1, "cohorts of different sizes"
    assert any(SIZES[i] == 0 for cohort in cohorts for i in cohort), "a client without examples"
    private = run_of(reference("dp_both")).replay
    batches = [b for c in cohorts for i in c for b in private.batches(0, i, 3)]
    assert any(len(b) == 0 for b in batches), "an empty Poisson batch"
    assert len({len(b) for b in batches}) > 2


def without_noise(hyper):
    """Turns all noise off; the compiled program stays."""
    local, aggregator = hyper.local, dict(hyper.aggregator)
    if local.noise_multiplier is not None:
        local = local._replace(noise_multiplier=np.zeros_like(local.noise_multiplier))
    if "noise_multiplier" in aggregator:
        aggregator["noise_multiplier"] = 0.0
    return hyper._replace(local=local, aggregator=aggregator)


@pytest.mark.parametrize("name", quick_first(["dp_sgd", "dp_fedavg", "dp_both", "blur_lus"]))
def test_private_algorithms_agree_with_numpy_without_noise(name, monkeypatch):
    ref = reference(name)
    final, *_ = ref.sim.run(ref.initial, ref.key, ROUNDS, without_noise(ref.sim.hyper))
    assert ref.sim.num_traces() == 1
    run = run_of(ref)
    silent = np.zeros(4)
    monkeypatch.setattr(run.replay, "central_noise", lambda r: silent)
    monkeypatch.setattr(run.replay, "record_noise", lambda r, i, steps: [silent] * steps)
    assert_close(ref.case.observe(snapshot(final)), ref.case.expect(run))


_NO_ALGORITHM = ("averaging", "base", "model_averaging", "registry", "schedules", "values")


def algorithm_factories():
    """Finds every public function of the package that declares an algorithm."""
    package = fedjax_dp.algorithms
    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        if module.name in _NO_ALGORITHM:
            continue
        members = vars(__import__(f"{package.__name__}.{module.name}", fromlist=["*"]))
        factories = {
            name: f
            for name, f in members.items()
            if hasattr(f, "__wrapped__")  # Those that check their arguments are for users.
            and f.__module__.endswith("." + module.name)
            and inspect.signature(f).return_annotation is FederatedAlgorithm
            and not name.startswith("_")
        }
        assert factories, f"algorithms/{module.name}.py declares no algorithm"
        found |= factories
    return found


def test_every_algorithm_has_a_case():
    covered = {case.factory for case in CASES.values()}
    missing = {name for name, f in algorithm_factories().items() if f not in covered}
    assert not missing, f"add a case to tests/cases.py for {sorted(missing)}"


def test_every_algorithm_is_registered_by_name():
    missing = set(algorithm_factories()) - set(fedjax_dp.algorithms.ALGORITHMS)
    assert not missing, f"register {sorted(missing)} in algorithms/registry.py"


def sending_once(algorithm):
    """FedAvg whose server sends its model in the first round alone."""

    def broadcast(server, client):
        return SentIf(algorithm.broadcast(server, client), client.round == 0)

    return algorithm._replace(broadcast=broadcast)


def sending_one_model(algorithm):
    """R-DPCFL whose server sends each client the model after its last one, whatever it draws."""

    def broadcast(server, client):
        message = algorithm.broadcast(server, client)
        other = (client.known + 1) % NUM_MODELS
        models = message.models.replace(sends_all=jnp.bool_(False), index=other)
        return message._replace(models=models)

    return algorithm._replace(broadcast=broadcast)


FAULTY = {"fedavg": sending_once, "r_dpcfl": sending_one_model}


@pytest.mark.parametrize("name", later(FAULTY, mark=telling))
def test_an_algorithm_that_reads_more_than_it_sends_does_not_agree_with_numpy(name):
    """The message is the contract: a model that was not sent reads as zeros."""
    case = CASES[name]
    faulty = case._replace(make=lambda model: FAULTY[name](case.make(model)))
    sim, key = faulty.simulation(PLAIN), jax.random.key(KEY)
    initial = snapshot(sim.init(key))
    final, _, _ = sim.run(initial, key, ROUNDS)
    observed, expected = case.observe(snapshot(final)), case.expect(case.run_of(initial, key))
    with pytest.raises(AssertionError, match="Not equal"):
        assert_close(observed, expected)
