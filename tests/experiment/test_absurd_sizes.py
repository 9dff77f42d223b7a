"""Sizes that are mistakes are refused before anything of that size is made."""

import pathlib

import pytest

from fedjax_dp import experiment, privacy

B = 2_000_000_000
NONE, CLIENT = "--privacy.unit=none", "--privacy.unit=client"
FEDAVG = "--algorithm.name=fedavg"
REFUSED = {
    "clients": ([f"--data.num_clients={B}"], "num_clients must leave at least 1 of 1437 examples"),
    "clients without noise": ([NONE, FEDAVG, f"--data.num_clients={B}"], "num_clients must leave"),
    "width": (
        [NONE, FEDAVG, "--model.name=mlp", f"--model.options.hidden_sizes=[{B}]"],
        "a round must fit",
    ),
    "models": ([NONE, "--algorithm.name=ifca", f"--algorithm.options.num_models={B}"], "at most"),
    "cohort": (
        [NONE, FEDAVG, "--participation.sampler=fixed_size", f"--participation.cohort_size={B}"],
        "cohort_size must be at most the population",
    ),
    "memory": (
        [NONE, FEDAVG, f"--acceleration.memory={B // 2}", f"--run.rounds={B}"],
        "a round must fit",
    ),
}
# Such arrays would take 8 GB and more.
_MOST = 6 * 2**30


@pytest.fixture
def little_memory():
    """Lets this process map a few gigabytes more than it has."""
    resource, pages = pytest.importorskip("resource"), pathlib.Path("/proc/self/statm")
    if not pages.exists():
        pytest.skip("this system does not say how much a process maps")
    mapped = int(pages.read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + _MOST, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("what", REFUSED)
def test_a_size_that_no_machine_has_is_refused_by_its_key(what, little_memory):
    words, message = REFUSED[what]
    with pytest.raises((ValueError, MemoryError), match=message):
        experiment.assemble(experiment.load_config(None, words))


def test_bands_that_cannot_be_optimised_are_refused(little_memory):
    """XLA ends the process that compiles their optimisation."""
    with pytest.raises(ValueError, match="bands must be at most 1 in a run of 2000000000 rounds"):
        privacy.banded_noise(B, B // 2, min_separation=B // 2)
