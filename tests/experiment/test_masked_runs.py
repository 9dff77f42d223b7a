"""Secure aggregation by configuration: what is refused, what runs, and what the statement says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow, telling
from run_folders import assert_same_run, die_and_resume, execute, metrics, read_json
from small_problem import make_data, make_model, plain_trainer

from fedjax_dp.algorithms import fedavg
from fedjax_dp.core.messages import tariff_of
from fedjax_dp.data.participants import participation
from fedjax_dp.data.sampling import full_participation
from fedjax_dp.engine.facts import population_of
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly import population
from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.components.secure_aggregation import graph_of, under_masks
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.reading.validate import validate
from fedjax_dp.experiment.schema.config import Config, SecureAggregationSection
from fedjax_dp.experiment.studies.workloads import WORKLOADS, prepare
from fedjax_dp.server.base import Roster, Sender
from fedjax_dp.server.masking import gradient_mask
from fedjax_dp.server.mean import uniform_mean
from fedjax_dp.server.secure.aggregator import masks_of

FEDAVG = ("--privacy.unit=none", "--algorithm.name=fedavg")
DISCRETE = (
    *("--privacy.unit=client", "--algorithm.name=dp_fedavg"),
    *("--privacy.client.mechanism=discrete_gaussian", "--privacy.client.epsilon=none"),
    "--privacy.client.noise_multiplier=2",
)
SIX = ("--data.num_clients=6", "--run.rounds=2")
COHORT = ("--participation.sampler=fixed_size", "--participation.cohort_size=4")

pytestmark = pytest.mark.usefixtures("no_pictures")


def secure(**options):
    return [f"--secure_aggregation.{name}={value}" for name, value in options.items()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (secure(colluders=1), "secure_aggregation.colluders must be left out without a secure_"),
        (secure(form="masked", failure=1e-9), "secure_aggregation.failure must be none for"),
        (secure(form="masked", num_neighbors=2), "secure_aggregation.num_neighbors must be none"),
        (secure(form="masked", colluders=6), "secure_aggregation.colluders must be at most 4, so"),
        (
            [*FEDAVG, *secure(form="masked"), "--communication.serverless=true"],
            "secure_aggregation.colluders must be at least 1: its aggregator must have a",
        ),
        (
            [*secure(form="masked"), "--communication.servers=[0, 0, 0, 0, 0, 1]"],
            "communication.servers must give each server at least 2 clients of a round under",
        ),
        (secure(form="masked", dropouts=6), "secure_aggregation.dropouts must leave 2 of 6"),
        (
            secure(form="masked", absent=5),
            "secure_aggregation.absent must leave at least 2 of the 6 clients of a round, got 5",
        ),
        (
            secure(form="masked", absent=2, dropouts=3),
            "secure_aggregation.dropouts must leave 2 of 4",
        ),
        (
            secure(form="masked", graph="random_neighbors", num_neighbors=6),
            "secure_aggregation.num_neighbors must be even, at least 2 and below the 6 clients",
        ),
        (
            secure(form="masked", integer_bits=9, fraction_bits=20),
            "secure_aggregation.fraction_bits must be from -9 to 19 for 6 clients",
        ),
        (
            [*secure(form="masked"), "--participation.sampler=poisson"],
            "participation.sampler must draw cohorts of a fixed size under secure_aggregation",
        ),
        (
            [*secure(form="masked"), COHORT[0], "--participation.cohort_size=1"],
            "the number of clients of a round must be at least 2 under secure_aggregation, got 1",
        ),
        (
            secure(form="masked", integer_bits=40),
            "secure_aggregation.integer_bits must be an integer from -30 to 29, got 40",
        ),
        (
            secure(form="masked", word_bits=64, integer_bits=9, fraction_bits=60),
            "secure_aggregation.fraction_bits must be from -9 to 51 for 6 clients",
        ),
        (
            [*secure(form="masked", word_bits=64), "--data.num_clients=70000"],
            "secure_aggregation.word_bits must be 32 for rounds of 70000 clients, more than 65536",
        ),
        ([*DISCRETE, *secure(form="masked", integer_bits=3)], "be none for discrete_gaussian"),
        ([*DISCRETE, *secure(form="masked", word_bits=64)], "word_bits must be 32 for discrete"),
        (
            [*DISCRETE, *secure(form="masked", colluders=2, dropouts=3)],
            "secure_aggregation.dropouts must leave 2 of 6 clients in addition to 2 colluders",
        ),
        (
            [*DISCRETE, *secure(form="masked", graph="random_neighbors", colluders=2, failure=0.9)],
            "secure_aggregation.graph must keep messages secret in all 2 rounds but with a",
        ),
    ],
)
def test_bad_input_is_refused_before_data_are_read(monkeypatch, words, message):
    monkeypatch.setattr(population.datasets, "load", None)
    unit = () if DISCRETE[0] in words else FEDAVG
    with pytest.raises(ValueError) as error:
        assemble(load_config(None, [*SIX, *unit, *words]))
    assert message in str(error.value)


def test_an_aggregator_that_needs_every_message_is_refused():
    words = [*SIX, *FEDAVG, "--algorithm.aggregator=trimmed_mean", *secure(form="cancelled")]
    with pytest.raises(ValueError, match=r"secure_aggregation\.form must be left out for fedavg"):
        assemble(load_config(None, words))


def test_noise_is_for_the_clients_that_neither_absence_nor_drop_outs_take_away():
    options = secure(form="masked", absent=1, dropouts=2, colluders=1)
    experiment = assemble(load_config(None, [*SIX, *DISCRETE, *options]))
    algorithm = experiment.simulation.algorithm
    graph = masks_of(algorithm.aggregator).graph
    assert (graph.num_clients, graph.min_senders, graph.threshold) == (5, 3, 2)
    assert algorithm.claims.min_participants == 3


def test_words_hold_the_weights_of_clients():
    """Means by size send numbers of examples, which the usual range of floats would cut."""
    joined = participation(full_participation(), 3)
    model, key = make_model(), jax.random.key(0)
    data = population_of(make_data(sizes=(600, 5, 40)))
    update = jax.tree.map(jnp.ones_like, model.init(key))
    roster = Roster(jnp.arange(3), jnp.ones(3, bool))
    sender = Sender(jnp.int32(0), jnp.float32(600), key, key, roster)

    def mean_of(aggregator=None, **options):
        section = SecureAggregationSection(form="cancelled", **options)
        algorithm = fedavg(model, plain_trainer(model), aggregator=aggregator)
        graph = graph_of(Config(secure_aggregation=section), joined)
        return under_masks(section, graph, joined, algorithm, data)[0].aggregator

    mean = mean_of()
    contribution = mean.contribute((), {}, update, sender)
    assert int(mean.encode((), {}, contribution, sender)[1].value) == 0, "an entry was cut"
    wide = mean_of(word_bits=64).message(update, jnp.float32(600))
    assert set(tariff_of(wide).fixed["dense"]) == {"uint64"}
    with pytest.raises(ValueError, match=r"integer_bits must be at least 10, since .* up to 600"):
        mean_of(integer_bits=4)
    mean_of(gradient_mask(uniform_mean()), integer_bits=0)


def test_a_written_configuration_is_read_back():
    plain = load_config(None, [*SIX, *FEDAVG, "--secure_aggregation.form=none"])
    assert "secure_aggregation" not in config_files.to_toml(plain)
    config = load_config(None, [*SIX, *FEDAVG, *secure(form="masked", dropouts=1)])
    again = config_files.from_toml(config_files.to_toml(config), "config.toml")
    validate(again)
    assert again.secure_aggregation == config.secure_aggregation


@slow
def test_masks_change_nothing_but_the_statement(tmp_path):
    """Noise in shares: integers, whose sums are exact without masks too."""
    own = ("privacy.json", "privacy.md", "config.toml", "metrics.jsonl", "secure_aggregation")
    # Without masks a run also counts clipped updates, which no event covers, and hints read them.
    own += ("communication", "not_private", "clipped_client_share", "hints")
    words = [*SIX, *DISCRETE, "--participation.sampler=full_participation"]
    forms = [secure(form=form, graph="random_neighbors") for form in ("masked", "cancelled")]
    for name, more in zip(("plain", "masked", "cancelled"), ([], *forms), strict=True):
        assert execute(tmp_path / name, *words, *more)[0] == 0
        if more:
            assert_same_run(tmp_path / "plain", tmp_path / name, besides=own)
            text = (tmp_path / name / "privacy.md").read_text("utf-8")
            assert "honest but curious" in text
            assert "masks with 2 random neighbours. It protects as long as" in text
            rows = metrics(tmp_path / name)
            assert all(row["num_lost"] == row["num_recovered"] == 0 for row in rows)
    assert "every mask was made and removed" in (tmp_path / "masked" / "privacy.md").read_text()
    found = read_json(tmp_path / "cancelled", "summary.json")["secure_aggregation"]
    assert found["form"] == "cancelled" and found["keys"] == "simulated"


@telling
def test_masks_cancel_in_a_run_without_a_server(tmp_path):
    """The same models with a server; each client sends its words to five others."""
    pytest.importorskip("cryptography")
    words = [*SIX, *FEDAVG, *secure(form="masked", colluders=1, keys="agreed")]
    assert execute(tmp_path / "alone", *words, "--communication.serverless=true")[0] == 0
    assert execute(tmp_path / "served", *words)[0] == 0
    rows, served = metrics(tmp_path / "alone"), metrics(tmp_path / "served")
    for row, other in zip(rows, served, strict=True):
        assert row["test_loss"] == other["test_loss"] and row["num_lost"] == 0
        assert row["num_messages"] == 30 and row["bytes_down"] == 0
        # Keys and shares, which go through a server, are counted there alone.
        assert 1 < row["bytes_up"] / other["bytes_up"] < 5


@telling
def test_servers_of_few_clients_sum_under_masks_of_their_own(tmp_path):
    """Three servers of two clients each, which exchange models after two of three rounds."""
    words = [*SIX[:1], "--run.rounds=3", *FEDAVG, "--communication.servers=[0, 1, 2]"]
    words += ["--communication.exchange_every=2"]
    assert execute(tmp_path / "plain", *words)[0] == 0
    assert execute(tmp_path / "masked", *words, *secure(form="masked"))[0] == 0
    rows = metrics(tmp_path / "masked")
    assert [row["num_lost"] for row in rows] == [0] * 3
    losses = [
        [row["test_loss"] for row in metrics(tmp_path / name)] for name in ("plain", "masked")
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    experiment = assemble(load_config(None, words))
    state = experiment.simulation.init(jax.random.key(experiment.config.run.seed))
    assert len(jax.tree.leaves(state.outer[0].server)[0]) == 2


@slow
def test_words_of_64_bits_give_what_the_plain_run_gives(tmp_path):
    """Sums are exact but for 2^-50, and rounded once: models differ by roundings of float32."""
    losses = []
    for form in ("none", "masked", "cancelled"):
        words = [*SIX, *FEDAVG, *secure(form=form)]
        words += [] if form == "none" else secure(word_bits=64, dropouts=1)
        assert execute(tmp_path / form, *words)[0] == 0
        losses.append([row["train_loss"] for row in metrics(tmp_path / form)])
    assert losses[1] == losses[2]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
    assert_same_run(
        tmp_path / "masked", tmp_path / "cancelled", besides=("config.toml", "secure_aggregation")
    )
    sent = read_json(tmp_path / "masked", "summary.json")["communication"]
    assert "uint64" in str(sent)


@slow
def test_a_masked_run_with_colluders_resumes_with_new_keys(tmp_path):
    pytest.importorskip("cryptography")
    words = [*SIX, *DISCRETE, "--run.rounds=8", "--run.checkpoint_every=3"]
    words += secure(form="masked", colluders=1, dropouts=1, keys="agreed")
    assert execute(tmp_path / "whole", *words)[0] == 0
    die_and_resume(tmp_path / "cut", 4, *words)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    text = (tmp_path / "cut" / "privacy.md").read_text("utf-8")
    assert "that collude with the server is at most 1. If more than 1 drop out, the round" in text
    assert "agreed by X25519" in text


@telling
def test_noise_makes_up_for_colluders_and_drop_outs():
    """Of six shares those of a colluder and of a drop-out are not counted."""
    few = assemble(load_config(None, [*SIX, *DISCRETE, *secure(form="cancelled")]))
    options = secure(form="cancelled", colluders=1, dropouts=1)
    many = assemble(load_config(None, [*SIX, *DISCRETE, *options]))
    claims = [e.simulation.algorithm.claims.client for e in (few, many)]
    events = [claim.event({}) for claim in claims]
    assert [event.num_shares for event in events] == [6, 4]
    assert [claim.min_participants for claim in claims] == [6, 5]
    assert many.stated["secure_aggregation"]["colluders"] == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("W1masked", {"uint32": 28}),
        ("W1masked64", {"uint64": 56}),
        ("W1cancelled", {"uint32": 28}),
    ],
)
def test_benchmarks_of_masks_send_words(name, words):
    workload = WORKLOADS[name]._replace(model="logistic_regression", shape=(3,), num_classes=2)
    sent = prepare(workload).algorithm.aggregator.message(
        {"w": jax.ShapeDtypeStruct((3, 2), "float32")}, jax.ShapeDtypeStruct((), "float32")
    )
    # Six parameters, and the number of clients.
    assert workload.base == "W1" and tariff_of(sent).fixed["dense"] == words
