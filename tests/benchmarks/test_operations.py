"""Rounds are exported for accelerators that are not here, and hold what those do well."""

import json

import jax
import pytest
from marks import slow, telling

from benchmarks.operations import PLATFORMS, RESULTS, counts, custom_calls, exported, table
from fedjax_dp.experiment.studies.workloads import WORKLOADS

CONVOLUTIONAL = ("emnist_cnn", "thesis_cnn", "resnet18")
# Clipped records on batched products, and clipped clients.
TELLING = {("W3", "cuda"), ("W4dp", "tpu")}
CASES = [
    pytest.param(name, platform, marks=telling if (name, platform) in TELLING else slow)
    for platform in PLATFORMS
    for name in WORKLOADS
]


def kept():
    return json.loads((RESULTS / "operations.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("name", "platform"), CASES)
def test_a_round_is_exported_with_the_operations_of_the_table(name, platform):
    round_of = exported(name, platform)
    assert round_of.platforms == (platform,)
    text, document = round_of.mlir_module(), kept()
    found = counts(text)
    # No call of the host, and of libraries only those that solve for Anderson's weights and, on
    # GPUs, factor the gradients of records.
    assert not any("callback" in target for target in custom_calls(text))
    workload = WORKLOADS[name]
    factors = platform == "cuda" and workload.unit == "record"
    assert name == "W1anderson" or factors or not custom_calls(text)
    assert "f64" not in text
    assert (found["convolutions"] > 0) == (workload.model in CONVOLUTIONAL)
    if workload.unit == "record":
        assert found["products"] == found["exact products"]
    if document["jax"] == jax.__version__:
        assert found == document[platform][name]


def test_the_page_is_the_table_of_the_counts():
    document = kept()
    version = document.pop("jax")
    assert {*document} == {*PLATFORMS}
    assert all({*rows} == {*WORKLOADS} for rows in document.values())
    page = (RESULTS / "operations.md").read_text(encoding="utf-8")
    assert page == table(document).replace(f"JAX {jax.__version__}", f"JAX {version}")
