"""Oblivious noise by configuration: its event, refusals, statement, bytes, and colluders."""

import json

import dp_accounting
import numpy as np
import pytest
from marks import slow, telling
from run_folders import SMALL, execute, metrics, read_json
from typer.testing import CliRunner

from fedjax_dp.cli import audit
from fedjax_dp.engine import PrivacyAccounting
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.reading.validate import validate
from fedjax_dp.experiment.running.results import facts_of
from fedjax_dp.experiment.studies.audits import _collude
from fedjax_dp.flower.plan import require_own_scale
from fedjax_dp.privacy import Ledger
from fedjax_dp.privacy.reports.statement import in_words, statement

# Three clients; softmax regression of 64 features and 10 classes.
NUM, SIZE = 3, 650
OBLIVIOUS = (
    *SMALL,
    *("--privacy.unit=client", "--algorithm.name=dp_fedavg"),
    "--privacy.client.mechanism=oblivious",
)
NOISE = ("--privacy.client.noise_multiplier=200", "--privacy.client.epsilon=none")

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--participation.sampler=poisson",), "sampler must draw cohorts of one size"),
        (
            ("--participation.sampler=fixed_size", "--participation.cohort_size=1"),
            "the number of clients of a round must be at least 2 for oblivious noise",
        ),
        (
            ("--secure_aggregation.form=masked",),
            "secure_aggregation.form must be left out for oblivious noise, whose",
        ),
        (
            ("--privacy.client.form=one", "--privacy.client.self_noise=false"),
            "privacy.client.self_noise must be true for form 'one'",
        ),
        (
            ("--communication.serverless=true",),
            "communication.serverless must be left out: its aggregator must add no noise",
        ),
        (
            ("--communication.servers=[0, 1]",),
            "communication.servers must be left out under privacy of clients",
        ),
        (
            ("--algorithm.aggregator=gradient_mask",),
            "privacy.client.mechanism must .* a claim for Gaussian noise",
        ),
        (
            ("--algorithm.name=ae_dpfl", "--data.public_examples=9"),
            "mechanism must be gaussian or laplace for ae_dpfl",
        ),
        (("--privacy.client.denominator=realised",), "denominator must be left out under the mech"),
    ],
)
def test_what_hides_no_client_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        validate(load_config(None, (*OBLIVIOUS, *words)))


CLOCK = (
    *("--clock.places=['here']", "--clock.seconds=[[1]]", "--clock.clients=['here']"),
    "--clock.server=here",
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--clock.keep=2", *CLOCK), "clock.keep must be at least 3, the clients whose noise"),
        (
            ("--asynchronous.concurrency=2", *CLOCK, "--participation.sampler=min_separated"),
            "must send plain updates: masks, noise shares",
        ),
    ],
)
def test_rounds_that_a_party_may_miss_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        assemble(load_config(None, (*OBLIVIOUS, *NOISE, *words)))


@pytest.mark.parametrize(
    ("words", "divisor"),
    [
        ((), 1),
        (("--privacy.client.form=one",), 1),
        (("--privacy.client.calibration=variance",), np.sqrt(NUM)),
        (
            ("--privacy.client.calibration=variance", "--privacy.client.self_noise=false"),
            np.sqrt(2),
        ),
        (("--privacy.client.calibration=paper",), NUM),
    ],
)
def test_the_statement_has_the_cost_of_the_noise_that_is_added(words, divisor):
    """√d/z of a release of d parameters for one Laplace of scale z, times what is printed less."""
    experiment = assemble(load_config(None, (*OBLIVIOUS, *NOISE, *words)))
    simulation = experiment.simulation
    ledger = PrivacyAccounting(simulation).ledgers["client"]
    event = simulation.algorithm.claims.client.event(simulation.hyper.aggregator)
    # 1/ε of a release.
    assert event.noise_multiplier == pytest.approx(200 / np.sqrt(SIZE) / divisor, rel=1e-6)
    ledger.charge(event)
    facts = facts_of(experiment, simulation.hyper, ())["client"]
    found = statement(ledger, 1e-5, **facts)
    single = Ledger("client", "zero_out")
    single.charge(dp_accounting.LaplaceDpEvent(200 / np.sqrt(SIZE) / divisor))
    assert found["epsilon"] == pytest.approx(float(single.epsilon(1e-5)[0]), rel=1e-6)
    assert found["trusted"] == "gamma_shares"
    text = in_words(found)
    assert "It does not hold against a coalition of parties" in text
    assert "Laplace noise in gamma shares" in text


def test_a_budget_becomes_noise_and_another_form_costs_the_same():
    noise = []
    for form in ("pairs", "one"):
        words = ("--privacy.client.epsilon=8", f"--privacy.client.form={form}")
        experiment = assemble(load_config(None, (*OBLIVIOUS, *words)))
        noise.append(float(experiment.simulation.hyper.aggregator["noise_multiplier"]))
    # Two rounds of √d/z each are at most 8; Rényi composition may spend a little less noise.
    assert noise[0] == noise[1] and 0.8 < noise[0] / (2 * np.sqrt(SIZE) / 8) <= 1.001


def test_a_deployment_without_the_masks_of_the_protocol_is_refused():
    algorithm = assemble(load_config(None, (*OBLIVIOUS, *NOISE))).simulation.algorithm
    require_own_scale(algorithm, "parity")
    with pytest.raises(ValueError, match="keys must be parity, which trusts the server"):
        require_own_scale(algorithm, "device")


def by_hand(words, multiplier):
    """r² of colluders against entries of ±1 from variances: 2s² a Laplace of the sum."""
    scale = np.sqrt(SIZE) * multiplier
    shares = NUM if "one" not in str(words) else 1
    share = 2 * scale**2 / NUM
    own = shares * share
    left = {"naive": NUM * own, "non_oblivious": own, "pooled": own, "random": NUM * own}
    left |= {"mean": (NUM - 1) / 2 * own + own, "diff": 3 * (NUM - 1) * own + own}
    return {kind: 1 / (1 + variance) for kind, variance in left.items()}


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ((), {"naive", "random", "mean", "diff", "pooled"}),
        (("--privacy.client.form=one",), {"naive", "non_oblivious"}),
    ],
)
def test_colluders_find_as_much_as_the_shares_that_stay_allow(words, kinds):
    little = ("--privacy.client.noise_multiplier=0.02", "--privacy.client.epsilon=none")
    attacks, why_not = _collude(assemble(load_config(None, (*OBLIVIOUS, *little, *words))))
    found = {attack.attack: attack for attack in attacks}
    assert set(found) == kinds and not why_not
    for kind, attack in found.items():
        assert attack.r2 == pytest.approx(by_hand(words, 0.02)[kind], abs=0.12)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            (*NOISE, "--data.num_clients=201"),
            "a round has 201 clients, more than 200, and memory would hold the noise terms",
        ),
        (
            ("--privacy.client.noise_multiplier=0", "--privacy.client.epsilon=none"),
            "there is no noise, and all clients but one can compute what that one sent",
        ),
    ],
)
def test_collusion_that_is_not_tried_is_reported_with_the_reason(words, why):
    attacks, why_not = _collude(assemble(load_config(None, (*OBLIVIOUS, *words))))
    assert attacks == [] and why_not.startswith(why)


def test_no_collusion_is_missed_where_noise_is_in_no_shares():
    words = (*SMALL, "--privacy.unit=client", "--algorithm.name=dp_fedavg")
    assert _collude(assemble(load_config(None, words))) == ([], "")


@telling
def test_a_run_counts_the_terms_of_pairs_and_writes_its_claim(tmp_path):
    assert execute(tmp_path / "run", *OBLIVIOUS, *NOISE)[0] == 0
    rows = metrics(tmp_path / "run")
    # Words of 8 bytes: a message of each client, and a masked pair for each other one; keys once.
    terms, keys = NUM * (NUM - 1) * 2 * SIZE * 8, NUM * (NUM - 1) * 32
    assert [row["bytes_up"] for row in rows] == [
        NUM * SIZE * 8 + terms + keys * first for first in (1, 0)
    ]
    assert read_json(tmp_path / "run", "privacy.json")["claims"][0]["trusted"] == "gamma_shares"


@slow
def test_an_audit_shows_what_colluders_find():
    words = ("--json", "--no-membership", "--canaries=5", "--runs=1", *OBLIVIOUS[len(SMALL) :])
    small = ("--data.num_clients=3", "--run.rounds=2")
    result = CliRunner().invoke(audit.app, [*small, *words, *NOISE], catch_exceptions=False)
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and not report["is_violated"]
    assert {attack["attack"] for attack in report["collusion"]} >= {"naive", "pooled"}
