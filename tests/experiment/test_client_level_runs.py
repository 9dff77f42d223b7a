"""Client-level privacy from configuration: each variant is a composition of named parts."""

import numpy as np
import pytest
from marks import telling
from run_folders import SMALL, execute, metrics, read_json

from fedjax_dp.core.trees import num_parameters
from fedjax_dp.engine.facts import population_of as sizes_and_shapes
from fedjax_dp.engine.federation import federation
from fedjax_dp.experiment.assembly.assemble import parts_of, population_of
from fedjax_dp.experiment.reading.config_files import load_config
from fedjax_dp.experiment.reading.validate import validate
from fedjax_dp.experiment.studies import timing
from fedjax_dp.experiment.studies.workloads import WORKLOADS, prepare

SEQUENTIAL = "--execution.clients_per_chunk=1"
POISSON = ("--participation.sampler=poisson", "--participation.cohort_size=2")
CLIENT = (*POISSON, "--privacy.unit=client", SEQUENTIAL)

VARIANTS = {
    "momentum": ("--algorithm.name=fedavgm",),
    "adam": ("--algorithm.name=fedadam",),
    "blur + lus with adam": (
        "--algorithm.name=blur_lus",
        "--algorithm.options.server=fedadam",
        "--algorithm.options.server_options={server_learning_rate = 0.01}",
    ),
    "blur alone": ("--algorithm.name=blur_lus", "--algorithm.options.sparsity=0"),
    "lus alone": ("--algorithm.name=blur_lus", "--algorithm.options.strength=0"),
    "adaptive": ("--algorithm.name=blur_lus", "--privacy.client.adaptive_clipping=true"),
    "staircase": ("--algorithm.name=dp_fedavg", "--privacy.client.mechanism=staircase"),
    "laplace": ("--algorithm.name=dp_fedavg", "--privacy.client.mechanism=laplace"),
    "bounded laplace": ("--algorithm.name=dp_fedavg", "--privacy.client.mechanism=bounded_laplace"),
    "ddgauss": ("--algorithm.name=dp_fedavg", "--privacy.client.mechanism=discrete_gaussian"),
    "blur + lus with ddgauss": (
        "--algorithm.name=blur_lus",
        "--privacy.client.mechanism=discrete_gaussian",
        "--privacy.client.bits=auto",
    ),
    "central discrete": (
        "--algorithm.name=dp_fedavg",
        "--privacy.client.mechanism=central_discrete_gaussian",
    ),
    "votes": ("--algorithm.name=ae_dpfl", "--data.public_examples=100"),
    "scaffold": ("--algorithm.name=scaffold", "--privacy.client.part_scales={control=0.3}"),
    "scaffold in shares": (
        "--algorithm.name=scaffold",
        "--privacy.client.part_shares={params = 0.8, control = 0.6}",
    ),
    "feddyn": ("--algorithm.name=feddyn",),
    "fedpi": ("--algorithm.name=fedpi",),
    "mr_mtl, adaptive": ("--algorithm.name=mr_mtl", "--privacy.client.adaptive_clipping=true"),
    "ifca": (
        *("--algorithm.name=ifca", "--algorithm.options.num_models=2"),
        "--algorithm.options.is_weighted=false",
    ),
}
# Clients of these have states, some of them a model of their own.
STATEFUL, PERSONAL = ("scaffold", "scaffold in shares", "feddyn", "fedpi", "ifca"), "mr_mtl"
QUICK = ("blur + lus with ddgauss",)


@telling
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in VARIANTS]
)
def test_a_variant_runs_within_its_budget_and_reports_its_figures(tmp_path, name):
    folder = tmp_path / "run"
    words = (*SMALL, *CLIENT, "--training.learning_rate=0.5", *VARIANTS[name])
    status, _ = execute(folder, *words)
    (claim,) = read_json(folder, "privacy.json")["claims"]
    summary, rows = read_json(folder, "summary.json"), metrics(folder)
    assert status == 0 and claim["unit"] == "client"
    assert claim["epsilon"] <= 8 and claim["epsilon"] == pytest.approx(8, rel=1e-3)
    for row in rows:
        quantiles = row["update_norm_quantiles"]
        assert len(quantiles) == 5 and sorted(quantiles) == quantiles
        assert row["clipped_client_share"] * max(row["num_participants"], 1) == pytest.approx(
            row["num_clipped"]
        )
        assert row["noise_stddev"] > 0
        # No record's gradient has a bound here.
        assert "clipped_example_share" not in row
    for figure in ("noise_stddev", "clipped_client_share"):
        assert summary[figure] == pytest.approx(np.mean([row[figure] for row in rows]))
    assert "clipped_example_share" not in summary
    assert (folder / "plots" / "update_norms.png").is_file()
    if "ddgauss" in name:
        # 650 parameters are padded to 1,024.
        bits = summary["bits_per_parameter"] * 650 / 1024
        assert bits == pytest.approx(16) if name == "ddgauss" else 8 < round(bits, 3) < 16
        assert claim["trusted"] == "secure_aggregation"
        assert "Poisson sampling" in claim["samplers"]
    if name == "central discrete":
        assert claim["trusted"] == "server" and claim["mechanisms"] == ["discrete Gaussian noise"]
    assert ("initial_clip_norm" in claim) == ("adaptive" in name)
    assert ("states_of_clients" in claim) == (name in STATEFUL)
    assert ("kept_by_clients" in claim) == name.startswith(PERSONAL)
    assert ("floating_point" in claim) == ("ddgauss" not in name and name != "central discrete")


NOISED = ("--privacy.client.noise_multiplier=1", "--privacy.client.epsilon=none")
SEPARATED = ("--participation.sampler=cyclic", "--participation.cohort_size=1")
ALL = ("--participation.sampler=full_participation", "--participation.cohort_size=none")
MECHANISMS = {
    "laplace": POISSON,
    "staircase": POISSON,
    "bounded_laplace": POISSON,
    "discrete_gaussian": ALL,
    "central_discrete_gaussian": POISSON,
    "correlated_gaussian": (*SEPARATED, "--privacy.client.bands=2"),
    "oblivious": ALL,
}


@telling
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_releases_all_parts_of_an_update(mechanism):
    """Built for the structure of the update, twice that of the model."""
    words = (f"--privacy.client.mechanism={mechanism}", *NOISED, *MECHANISMS[mechanism])
    words = ("--algorithm.name=scaffold", "--privacy.client.part_scales={control=0.3}", *words)
    parts = parts_of(load_config(None, (*SMALL, "--privacy.unit=client", *words)))
    population = sizes_and_shapes(parts.population.train, None)
    facts = federation(parts.algorithm, population, parts.participation).facts
    sizes = {part: num_parameters(tree) for part, tree in facts.aggregate.items()}
    assert sizes == {"params": 650, "control": 650}
    assert num_parameters(parts.setting.structure) == 1300


@pytest.mark.slow
def test_masked_messages_of_several_parts_are_those_without_masks(tmp_path):
    words = (*SMALL, "--privacy.unit=client", "--algorithm.name=scaffold", *NOISED, *ALL)
    words = (*words, "--data.num_clients=4", SEQUENTIAL, "--run.secret=false")
    plain, masked = tmp_path / "plain", tmp_path / "masked"
    assert execute(plain, *words)[0] == 0
    assert execute(masked, *words, "--secure_aggregation.form=masked")[0] == 0
    found = [read_json(folder, "summary.json") for folder in (plain, masked)]
    # Fixed point rounds each message; noise and cohort are the same.
    assert found[0]["test_loss"] == pytest.approx(found[1]["test_loss"], rel=1e-3)
    assert found[0]["epsilon"] == found[1]["epsilon"]


REALISED = ("--privacy.client.denominator=realised", "--privacy.client.epsilon=none")


@pytest.mark.slow
def test_a_realised_denominator_runs_without_any_claim(tmp_path):
    folder = tmp_path / "run"
    words = (*SMALL, *CLIENT, "--algorithm.name=dp_fedavg", *REALISED)
    status, text = execute(folder, *words, "--privacy.client.noise_multiplier=1.0")
    assert status == 0 and "no privacy is claimed" in text
    assert read_json(folder, "privacy.json")["claims"] == []


@pytest.mark.parametrize(
    "words, message",
    [
        (REALISED[:1], "denominator must be expected under a budget"),
        *(
            (
                (*REALISED, f"--privacy.client.mechanism={mechanism}"),
                f"denominator must be left out under the mechanism {mechanism}",
            )
            for mechanism in ("discrete_gaussian", "central_discrete_gaussian")
        ),
        (
            (
                "--algorithm.name=ae_dpfl",
                "--data.public_examples=9",
                "--privacy.client.mechanism=discrete_gaussian",
            ),
            "mechanism must be gaussian or laplace for ae_dpfl",
        ),
        *(
            (
                (f"--privacy.client.mechanism={mechanism}", f"--privacy.client.bits={bits}"),
                rf"client\.bits must be left out under the mechanism {mechanism}, got {got}",
            )
            for mechanism in ("central_discrete_gaussian", "gaussian")
            for bits, got in ((8, "8"), ("auto", "'auto'"))
        ),
        (
            ("--data.public_examples=9",),
            "public_examples must be 0 for dp_fedavg, which queries no public inputs",
        ),
        (("--algorithm.name=ae_dpfl",), "public_examples must be at least 1 for ae_dpfl"),
    ],
)
def test_what_has_no_claim_or_no_meaning_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        validate(load_config(None, (*SMALL, *CLIENT, "--algorithm.name=dp_fedavg", *words)))


@pytest.mark.parametrize("bits", [8, "auto"])
def test_bits_are_for_clients_that_send_shares(bits):
    words = ("--privacy.client.mechanism=discrete_gaussian", f"--privacy.client.bits={bits}")
    validate(load_config(None, (*SMALL, *CLIENT, "--algorithm.name=dp_fedavg", *words)))


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_public_examples_leave_the_pool_without_their_labels(partition):
    words = (*SMALL, f"--data.partition={partition}", "--data.client_test_share=0")
    whole = population_of(load_config(None, words))
    held = population_of(load_config(None, (*words, "--data.public_examples=100")))
    assert whole.public_x is None and held.public_x.shape[0] == 100
    assert held.train.num_examples == whole.train.num_examples - 100

    def rows(x):
        return sorted(map(bytes, np.ascontiguousarray(x)))

    everything = np.concatenate([held.public_x, held.train.examples["x"]])
    assert rows(everything) == rows(whole.train.examples["x"])
    again = population_of(load_config(None, (*words, "--data.public_examples=100")))
    np.testing.assert_array_equal(again.public_x, held.public_x)


def test_public_examples_must_leave_something():
    with pytest.raises(ValueError, match="public_examples must be below"):
        population_of(load_config(None, (*SMALL, "--data.public_examples=100000")))


def test_the_curve_over_cohorts_has_a_constant_population():
    settings = timing.settings("users", "auto", 1, "cohort")
    assert [changes for _, changes in settings] == [{"cohort": n} for n in (50, 200, 800, 2000)]
    parts = prepare(WORKLOADS["users"]._replace(cohort=50, num_clients=60))
    assert parts.data.num_clients == 60 and parts.participation.cohort_size == 50
    assert parts.participation.sampler.name == "poisson"
    assert parts.algorithm.claims.client is not None
