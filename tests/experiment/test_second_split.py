"""A second split of clients' own data, from configurations."""

import jax
import numpy as np
import pytest
from marks import telling
from run_folders import SMALL

from fedjax_dp.data.datasets import MissingDataError
from fedjax_dp.experiment.assembly.assemble import assemble, population_of
from fedjax_dp.experiment.reading.config_files import load_config
from fedjax_dp.experiment.running.results import evaluate

SIZES = "{train_per_class = 5, validation_per_client = 3, test_per_client = 8}"
FEW = ("--data.partition=few_classes", f"--data.partition_options={SIZES}")


def built(*words):
    return population_of(load_config(None, (*SMALL, *words)))


def rows(x):
    return sorted(map(bytes, np.ascontiguousarray(x)))


@pytest.mark.parametrize("share", [0.1, 0.25, 0.9])
@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_a_share_of_what_is_left_for_training(partition, share):
    words = (f"--data.partition={partition}", "--data.client_test_share=0.3")
    whole, split = built(*words), built(*words, f"--data.client_validation_share={share}")
    assert whole.validation is None
    sizes = whole.train.sizes
    apart = np.minimum(np.floor(share * sizes + 0.5), sizes - 1)
    np.testing.assert_array_equal(split.validation.sizes, apart)
    np.testing.assert_array_equal(split.train.sizes, sizes - apart)
    for client in range(whole.train.num_clients):
        both = [part.client(client)["x"] for part in (split.train, split.validation)]
        assert rows(np.concatenate(both)) == rows(whole.train.client(client)["x"])
    np.testing.assert_array_equal(split.client_test.examples["x"], whole.client_test.examples["x"])
    again = built(*words, f"--data.client_validation_share={share}")
    np.testing.assert_array_equal(again.validation.examples["x"], split.validation.examples["x"])


def test_class_mixtures_give_three_parts_of_the_same_mixture():
    sizes = "{train_per_client = 10, validation_per_client = 5, test_per_client = 10, alpha = 2.0}"
    population = built("--data.partition=class_mixtures", f"--data.partition_options={sizes}")
    parts = population.train, population.validation, population.client_test
    for client in range(population.train.num_clients):
        counts = [np.bincount(part.client(client)["y"], minlength=10) for part in parts]
        assert [count.sum() for count in counts] == [10, 5, 10]
        np.testing.assert_array_equal(counts[0], counts[2])
        assert np.abs(counts[0] - 2 * counts[1]).max() <= 1


def test_few_classes_give_three_parts_of_the_same_classes():
    population = built(*FEW)
    parts = population.train, population.validation, population.client_test
    for client in range(population.train.num_clients):
        own = [np.unique(part.client(client)["y"]) for part in parts]
        assert [len(part.client(client)["y"]) for part in parts] == [10, 3, 8]
        assert all(np.array_equal(classes, own[0]) and len(classes) == 2 for classes in own)
    assert built(*FEW).validation.examples["x"].tobytes() == parts[1].examples["x"].tobytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            (*FEW, "--data.client_validation_share=0.1"),
            "data.client_validation_share must be 0 for few_classes, which makes its own",
        ),
        (("--data.client_validation_share=1",), r"data.client_validation_share must .* got 1"),
        (
            ("--privacy.unit=none", "--algorithm.name=lottery_fl"),
            "validation must be given for lottery_fl",
        ),
    ],
)
def test_refusals(words, message):
    with pytest.raises(ValueError, match=message):
        assemble(load_config(None, (*SMALL, *words)))


@telling
@pytest.mark.parametrize("name", ["fedavg", "local_only"])
def test_clients_without_test_data_are_left_out_and_counted(name):
    words = ("--privacy.unit=none", f"--algorithm.name={name}", "--data.partition=quantity_skew")
    few = ("--data.client_test_share=0.002", "--data.partition_options={exponent = 2.0}")
    experiment = assemble(load_config(None, (*SMALL, *words, *few)))
    sizes = experiment.population.client_test.sizes
    assert 0 < np.sum(sizes == 0) < len(sizes)
    simulation = experiment.simulation
    state = simulation.init(jax.random.key(0))
    row = evaluate(experiment.evaluator, state, simulation.hyper, 0).figures
    assert row["clients_without_test_data"] == np.sum(sizes == 0)
    assert np.isfinite([row["mean_client_accuracy"], row["std_client_accuracy"]]).all()


def test_stratified_shares_keep_the_mixture_of_each_client():
    """Both shares, beside the counts of largest rests in NumPy."""
    words = ("--data.client_test_share=0.3", "--data.client_validation_share=0.25")
    plain, split = built(*words), built(*words, "--data.stratified=true")
    for part in ("train", "validation", "client_test"):
        np.testing.assert_array_equal(getattr(plain, part).sizes, getattr(split, part).sizes)
    for client in range(plain.train.num_clients):
        test, validation, train = (
            np.bincount(getattr(split, part).client(client)["y"], minlength=10)
            for part in ("client_test", "validation", "train")
        )
        for whole, apart in ((test + validation + train, test), (validation + train, validation)):
            exact = whole * apart.sum() / whole.sum()
            assert np.abs(apart - exact).max() < 1
            rests = exact - np.floor(exact)
            more = apart > exact
            assert rests[more].min(initial=1) >= rests[~more].max(initial=0) - 1e-12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (FEW, "data.stratified must be false where no share of each client's examples is held"),
        (("--data.client_test_share=0",), "data.stratified must be false where no share of each"),
        (
            ("--data.name=tiny_shakespeare",),
            "data.stratified must be false for tiny_shakespeare, whose labels are not classes of",
        ),
    ],
)
def test_refusals_of_strata(words, message):
    try:
        with pytest.raises(ValueError, match=message):
            built(*words, "--data.stratified=true")
    except MissingDataError:
        pytest.skip("the data are not here")
