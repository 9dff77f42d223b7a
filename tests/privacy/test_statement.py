"""The statement says what the ledger holds, in a form that readers can recompute."""

import json
import re

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting import rdp as dpa_rdp

from fedjax_dp.core.decimals import rounded_down
from fedjax_dp.data import sampling
from fedjax_dp.data.participants import participation
from fedjax_dp.privacy import events as ev
from fedjax_dp.privacy.accounting import rdp
from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.accounting.renyi import rdp_curves
from fedjax_dp.privacy.mechanisms.distributed import make_central_plan
from fedjax_dp.privacy.mechanisms.gamma_shares import GammaSharesDpEvent
from fedjax_dp.privacy.mechanisms.noise import BoundedLaplaceDpEvent, StaircaseDpEvent
from fedjax_dp.privacy.reports import statement as st
from fedjax_dp.privacy.reports.large_delta import large_delta
from fedjax_dp.privacy.reports.latex import for_paper


def poisson(q, z):
    return dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(z))


@pytest.fixture
def ledger():
    book = Ledger("record", num_units=4)
    book.charge(poisson(0.1, 1.5), units=[0, 2], count=100)
    book.charge(poisson(0.2, 2.5), units=[1], count=50)
    book.charge(dpa.ZCDpEvent(0.01), units=[1])
    return book


def test_epsilon_can_be_recomputed_from_the_statement_alone(ledger):
    data = json.loads(json.dumps(st.statement(ledger, 1e-5), allow_nan=False))
    assert sorted(u for h in data["histories"] for u in h["units"]) == [0, 1, 2, 3]
    for history in data["histories"]:
        account = dpa_rdp.RdpAccountant().compose(ev.from_dict(history["event"]))
        for unit in history["units"]:
            expected = account.get_epsilon(1e-5)
            assert data["epsilon_per_unit"][unit] == pytest.approx(expected, rel=1e-6)
    assert data["epsilon"] == max(data["epsilon_per_unit"]) > 0
    assert data["num_compositions"] == [100, 51, 100, 0]


@pytest.mark.parametrize("rate", [None, 0.2])
def test_events_of_this_package_are_recomputed_as_documented(rate):
    """Through a ledger, and by hand from curve and slack; dp-accounting alone refuses them."""
    event = BoundedLaplaceDpEvent(4.0, 2, 1e-8)
    if rate is not None:
        event = dpa.PoissonSampledDpEvent(rate, event)
    ran = Ledger()
    ran.charge(event, count=10)
    data = json.loads(json.dumps(st.statement(ran, 1e-5)))
    again = Ledger(data["unit"], data["relation"])
    restored = ev.from_dict(data["histories"][0]["event"])
    again.charge(restored)
    assert again.epsilon(1e-5, data["accountant"])[0] == data["epsilon"] > 0
    with pytest.raises(dpa.privacy_accountant.UnsupportedEventError):
        dpa_rdp.RdpAccountant().compose(restored)
    slack = ev.slack_of(restored, "add_remove")
    assert slack == pytest.approx(10 * (rate or 1) * 2 * 1e-8)
    curve = 10 * rdp_curves([event])[0]
    by_hand = rdp.to_epsilon(curve, rdp.DEFAULT_ORDERS, 1e-5 - slack)
    assert data["epsilon"] == pytest.approx(float(by_hand), rel=1e-12)


def test_sampler_mechanism_and_noise_are_read_off_what_ran(ledger):
    data = st.statement(ledger, 1e-5, clip_norm=np.array([1.0, 2.0]))
    assert data["samplers"] == ["Poisson sampling", "no sampling"]
    assert data["mechanisms"] == ["Gaussian noise", "releases with a zCDP cost"]
    assert data["noise_multiplier"] == [1.5, 2.5]
    assert data["clip_norm"] == [1.0, 2.0]
    truncated = Ledger("client", "replace_one")
    truncated.charge(dpa.TruncatedSubsampledGaussianDpEvent(100, 0.1, 20, 3.0))
    data = st.statement(truncated, 1e-5, accountant="pld")
    assert data["samplers"] == ["Poisson sampling truncated to a capacity"]
    fixed = Ledger("client", "replace_one")
    fixed.charge(dpa.SampledWithoutReplacementDpEvent(100, 10, dpa.GaussianDpEvent(3.0)))
    data = st.statement(fixed, 1e-5)
    assert data["samplers"] == ["fixed-size sampling without replacement"]


def test_noise_is_reported_in_the_measure_of_its_mechanism():
    """A multiplier of 1 is 1/ε of an entry, a scale, or a standard deviation."""
    epsilon, entry_delta = 0.8, 1e-6
    staircase = StaircaseDpEvent(1 / epsilon, 3)
    bounded = BoundedLaplaceDpEvent(1 / epsilon, 3, entry_delta)
    # The staircase's density: a(γ)·b^k on [k, k + γ), b times that up to k + 1.
    b, g = np.exp(-epsilon), 1 / (1 + np.exp(epsilon / 2))
    k = np.arange(200.0)
    height = (1 - b) / (2 * (g + b * (1 - g))) * b**k
    near = ((k + g) ** 3 - k**3) / 3
    far = ((k + 1) ** 3 - (k + g) ** 3) / 3
    variance = 2 * np.sum(height * (near + b * far))
    # Bounded Laplace: Laplace of scale 1/ε, cut off at its reach.
    x = np.linspace(0, np.log(1 + np.expm1(epsilon) / (2 * entry_delta)) / epsilon, 2_000_001)
    weight = np.exp(-epsilon * x)
    cut = np.trapezoid(x**2 * weight, x) / np.trapezoid(weight, x)
    for event, expected in ((staircase, variance**0.5), (bounded, cut**0.5)):
        ledger = Ledger()
        ledger.charge(event)
        data = st.statement(ledger, 1e-5)
        assert data["noise_multiplier"] is None and data["laplace_scale"] is None
        assert data["entry_stddev"] == pytest.approx([expected] * 2, rel=1e-4)
        words = st.in_words(data)
        assert f"standard deviation of {rounded_down(data['entry_stddev'][0])} times the" in words
        assert "largest contribution" not in words
    ledger = Ledger()
    ledger.charge(dpa.LaplaceDpEvent(2.5))
    ledger.charge(dpa.GaussianDpEvent(7.0))
    data = st.statement(ledger, 1e-5)
    assert (data["laplace_scale"], data["noise_multiplier"]) == ([2.5, 2.5], [7.0, 7.0])
    assert data["entry_stddev"] is None
    words = st.in_words(data)
    assert "scale of 2.5 times the largest L1 norm" in words
    assert "standard deviation of 7 times the largest contribution" in words


@pytest.mark.parametrize(
    "unit,relation,trust,phrases",
    [
        ("client", "add_remove", None, ["one client", "present or absent", "server is trusted"]),
        (
            "record",
            "zero_out",
            None,
            ["one record of one client", "replaced by zeros", "numbers of clients", "public"],
        ),
        ("record", "replace_one", None, ["one record of one client", "exchanged", "Only the"]),
        ("client", "add_remove", "secure_aggregation", ["Secure aggregation is trusted"]),
    ],
)
def test_words_name_unit_relation_numbers_and_trust(unit, relation, trust, phrases):
    ledger = Ledger(unit, relation)
    ledger.charge(poisson(0.1, 1.5), count=10)
    data = st.statement(ledger, 1e-6, accountant="pld", trust=trust)
    words = st.in_words(data)
    for phrase in [*phrases, f"ε = {data['epsilon']:.4g}", "δ = 1e-06", "`pld`", "10 releases"]:
        assert phrase in words
    assert "Not private" in words and "losses" in words
    assert ("present or absent" in words) == (relation == "add_remove")


@pytest.mark.parametrize("trust", [None, "secure_aggregation"])
def test_a_deployment_says_where_no_masks_hide_messages(trust):
    ledger = Ledger("client", "add_remove")
    ledger.charge(poisson(0.1, 1.5))
    data = st.statement(ledger, 1e-6, trust=trust, deployment={"keys": "device"})
    words = st.in_words(data)
    assert "Deployed on Flower" in words
    assert ("Nodes agreed on no keys of masks" in words) == (trust is not None)


def test_a_deployment_says_whom_masks_between_nodes_hide_messages_from():
    ledger = Ledger("client", "zero_out")
    ledger.charge(poisson(0.1, 1.5))
    facts = {
        **{"form": "masked", "keys": "between_nodes", "num_neighbors": None, "failure": 0.0},
        **{"colluders": 1, "dropouts": 2, "secrecy_failure": 0.0},
    }
    found = {"secure_aggregation": facts, "deployment": {"keys": "device"}}
    words = st.in_words(st.statement(ledger, 1e-6, trust="secure_aggregation", **found))
    assert "agreed by X25519 and HKDF between the clients on their nodes" in words
    assert "stand between two nodes" in words and "at most 1. If more than 2 drop out" in words
    assert "Nodes agreed on no keys of masks" not in words


@pytest.mark.parametrize(
    "noise_root, said, unsaid",
    [
        ("seed", ["run.seed", "subtract it", "publishing two of them may cancel"], "operating"),
        ("secret", ["operating system", "destroyed or kept", "64", "not crypto"], "run.seed"),
    ],
)
def test_the_statement_names_the_source_of_the_noise(ledger, noise_root, said, unsaid):
    data = json.loads(json.dumps(st.statement(ledger, 1e-5, noise_root=noise_root)))
    words = st.in_words(data)
    assert data["noise_root"] == noise_root
    assert all(phrase in words for phrase in said) and unsaid not in words
    assert "a/root" not in words
    kept = st.in_words(st.statement(ledger, 1e-5, noise_root=noise_root, noise_root_file="a/root"))
    assert "The root is in `a/root` of the run folder and nowhere else." in kept


def test_the_statement_names_code_that_is_not_of_the_package(ledger):
    words = st.in_words(st.statement(ledger, 1e-5, own_parts=["mine.py:entry", "a.b:model"]))
    assert "takes part: `mine.py:entry`, `a.b:model`. It is trusted" in words
    assert "not of this package" not in st.in_words(st.statement(ledger, 1e-5))


@pytest.mark.parametrize(
    "trust, keys, root",
    [(None, "device", "nodes"), (None, "parity", "secret"), ("server", "device", "secret")],
)
def test_the_root_of_a_deployment_is_that_which_draws_its_noise(trust, keys, root):
    ledger = Ledger("record", "zero_out")
    ledger.charge(poisson(0.1, 1.5))
    facts = {"noise_root": "secret", "noise_root_file": "a/root", "deployment": {"keys": keys}}
    data = st.statement(ledger, 1e-5, trust=trust, **facts)
    words, of_run = st.in_words(data), root == "secret"
    assert data["noise_root"] == root
    assert ("`a/root`" in words) == ("destroyed or kept secret" in words) == of_run
    assert ("which the server never has" in words) != of_run
    assert ("root of the run gives what the server draws and cohorts that" in words) != of_run


@pytest.mark.parametrize(
    "event, relation, accountant, hidden",
    [
        (poisson(0.1, 1.5), "zero_out", "rdp", ["which", "how many"]),
        (
            dpa.TruncatedSubsampledGaussianDpEvent(100, 0.1, 20, 3.0),
            "zero_out",
            "pld",
            ["which", "how many"],
        ),
        (
            dpa.SampledWithoutReplacementDpEvent(100, 10, dpa.GaussianDpEvent(3.0)),
            "replace_one",
            "rdp",
            ["which"],
        ),
        (dpa.GaussianDpEvent(3.0), "zero_out", "rdp", []),
    ],
)
def test_the_statement_lists_what_sampling_needs_to_stay_hidden(
    event, relation, accountant, hidden
):
    """Given that n of N were drawn, the chance to be among them is n/N and not the rate."""
    ledger = Ledger("client", relation)
    ledger.charge(event)
    data = st.statement(ledger, 1e-3, accountant=accountant)
    words = st.in_words(data)
    assert data["must_stay_hidden"] == [f"{what} units were drawn" for what in hidden]
    assert all(what in words for what in data["must_stay_hidden"])
    assert ("must stay hidden" in words) == bool(hidden)
    assert ("n/N" in words) == ("how many" in hidden)


def test_a_run_without_noise_claims_nothing():
    ledger = Ledger()
    ledger.charge(dpa.NonPrivateDpEvent())
    data = st.statement(ledger, 1e-5)
    json.dumps(data, allow_nan=False)
    assert data["epsilon"] == "inf"
    assert "not differentially private" in st.in_words(data)
    assert "Nothing was released" in st.in_words(st.statement(Ledger(), 1e-5))


NO_NOISE = "is **not differentially private** at the level of {}s: no noise was added to protect"


@pytest.mark.parametrize("unit", ["client", "record"])
@pytest.mark.parametrize(
    "event",
    [
        dpa.GaussianDpEvent(0.0),
        poisson(0.1, 0.0),
        dpa.LaplaceDpEvent(0.0),
        StaircaseDpEvent(0.0, 2),
        BoundedLaplaceDpEvent(0.0, 2, 1e-8),
        GammaSharesDpEvent(0.0, 3),
        make_central_plan(100, 1.0, 0.0).event(),
    ],
    ids=lambda event: type(event).__name__,
)
def test_without_noise_a_statement_speaks_of_no_noise_and_no_trust(unit, event):
    """Nothing that a claim would rest on is left, and no noise has a name."""
    ledger = Ledger(unit, num_units=2)
    ledger.charge(event)
    facts = {"has_personal_models": True, "clip_norm": 1.0, "contribution": "5/k", "seed": 3}
    data = st.statement(ledger, 1e-5, **facts)
    words = st.in_words(data)
    assert data["epsilon"] == "inf" and NO_NOISE.format(unit) in words
    assert len(re.findall("noise", words)) == 1
    assert not re.search("trust|claim|ε|secret|hidden|covered|bound", words)
    assert words.endswith("Computed with seed 3.\n")
    assert NO_NOISE.format(unit).replace("*", "") in for_paper([data]).latex
    # One release with noise, and no longer all lack it.
    ledger.charge(dpa.GaussianDpEvent(2.0), units=[1])
    words = st.in_words(st.statement(ledger, 1e-5, **facts))
    assert "something was released without noise" in words and "trusted" in words


def test_what_is_not_covered_comes_before_any_claim():
    ledger = Ledger("record")
    ledger.charge(poisson(0.1, 1.5), count=10)
    data = st.statement(ledger, 1e-5, not_covered="the colour of the sky")
    words = st.in_words(data)
    assert words.index("not differentially private") < words.index("the colour of the sky")
    assert words.index("the colour of the sky") < words.index("ε =")
    assert data["not_covered"] == "the colour of the sky"
    assert "not_covered" not in st.statement(ledger, 1e-5)


def test_units_that_chose_their_own_delta_are_listed():
    ledger = Ledger("record", num_units=2)
    ledger.charge(poisson(0.1, 1.5), count=100)
    account = dpa_rdp.RdpAccountant().compose(poisson(0.1, 1.5), 100)
    data = json.loads(json.dumps(st.statement(ledger, [1e-4, 1e-6])))
    expected = [account.get_epsilon(1e-4), account.get_epsilon(1e-6)]
    assert data["epsilon_per_unit"] == pytest.approx(expected, rel=1e-6)
    assert expected[0] < expected[1] == pytest.approx(data["epsilon"], rel=1e-6)
    # Every unit is private at the largest ε and the largest δ together.
    assert data["dp_delta"] == 1e-4 and data["dp_delta_per_unit"] == [1e-4, 1e-6]
    assert "Every unit chose its own δ, from 1e-06 to 0.0001" in st.in_words(data)
    assert "chose its own" not in st.in_words(st.statement(ledger, 1e-5))


def shared(data):
    return data["shared_records"]["epsilon"], data["shared_records"]["dp_delta"]


def test_copies_of_a_record_at_several_clients_compose():
    """Clients of one history by the accountant, others by adding up ε and δ."""
    ledger = Ledger("record", num_units=5)
    ledger.charge(poisson(0.1, 1.5), count=100)
    data = json.loads(json.dumps(st.statement(ledger, 1e-5, num_shared=7, most_holders=3)))
    alone, together = (
        dpa_rdp.RdpAccountant().compose(poisson(0.1, 1.5), n).get_epsilon(1e-5) for n in (100, 300)
    )
    assert data["epsilon"] == pytest.approx(alone, rel=1e-6)
    assert shared(data) == (pytest.approx(together, rel=1e-6), 1e-5) and together > 1.5 * alone
    words = st.in_words(data)
    assert "7 training records are held by more than one client, one of them by 3" in words
    printed = re.search(r"for a record as a whole \*\*ε = ([0-9.]+)\*\* at δ = 1e-05", words)
    # Rounded up: 9.042281 to four digits is 9.043.
    assert printed and together <= float(printed[1]) <= together * (1 + 1e-3)
    ledger.charge(dpa.GaussianDpEvent(3.0), units=[1])
    data = st.statement(ledger, 1e-5, num_shared=7, most_holders=3)
    each = ledger.epsilon(1e-5)
    assert shared(data) == pytest.approx((each[1] + 2 * each[0], 3e-5))
    assert "by basic composition" in st.in_words(data)
    # Each of its copies chose its own δ: the largest three of these are added.
    data = st.statement(ledger, [1e-5, 1e-5, 1e-6, 1e-4, 1e-7], num_shared=7, most_holders=3)
    assert shared(data)[1] == pytest.approx(1.2e-4)


def test_no_epsilon_of_copies_is_stated_whose_deltas_reach_1():
    ledger = Ledger("record", num_units=4)
    ledger.charge(dpa.GaussianDpEvent(3.0))
    data = st.statement(ledger, [0.3, 0.4, 0.4, 0.4], num_shared=1, most_holders=4)
    assert shared(data) == (None, None) and "add up to 1 or more" in st.in_words(data)


def test_copies_of_a_record_in_one_account_have_no_stated_epsilon():
    ledger = Ledger("record")
    ledger.charge(poisson(0.1, 1.5), count=10)
    data = st.statement(ledger, 1e-5, num_shared=7, most_holders=3)
    assert shared(data) == (None, None) and "no ε is stated" in st.in_words(data)


def test_nothing_is_said_of_copies_where_there_are_none_or_clients_are_the_unit(ledger):
    assert "shared_records" not in st.statement(ledger, 1e-5)
    book = Ledger("client")
    book.charge(poisson(0.1, 1.5))
    assert "shared_records" not in st.statement(book, 1e-5, num_shared=7, most_holders=3)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="dp_delta must be in"):
        st.statement(Ledger(), 0.0)
    with pytest.raises(ValueError, match="dp_delta must be in"):
        st.statement(Ledger(num_units=2), [0.1, 1.0])
    with pytest.raises(ValueError, match="noise_root must be one of"):
        st.statement(Ledger(), 1e-5, noise_root="dice")
    with pytest.raises(ValueError, match="trust must be one of"):
        st.statement(Ledger(), 1e-5, trust="nobody")


DISCRETE = make_central_plan(100, 1.0, 1.0).event()


@pytest.mark.parametrize(
    ("event", "is_continuous"),
    [
        (dpa.GaussianDpEvent(1.0), True),
        (poisson(0.1, 1.0), True),
        (dpa.LaplaceDpEvent(2.0), True),
        (StaircaseDpEvent(4.0, 2), True),
        (DISCRETE, False),
        (dpa.PoissonSampledDpEvent(0.1, DISCRETE), False),
        (dpa.ComposedDpEvent([DISCRETE, dpa.GaussianDpEvent(9.0)]), True),
        (dpa.NonPrivateDpEvent(), False),
    ],
)
def test_what_floating_point_noise_leaves_open_is_said_where_noise_was_continuous(
    event, is_continuous
):
    for unit in ("client", "record"):
        ran = Ledger(unit)
        ran.charge(event)
        data = st.statement(ran, 1e-5)
        words = st.in_words(data)
        assert ("floating_point" in data) == is_continuous
        assert (
            ("Mironov 2012" in words) == ("`central_discrete_gaussian`" in words) == is_continuous
        )
        assert ("no discrete mechanism on records" in words) == (is_continuous and unit == "record")


@pytest.mark.parametrize(
    ("unit", "said", "unsaid"),
    [
        ("client", "no ε covers them", "which cover them"),
        ("record", "which cover them", "no ε covers them"),
    ],
)
def test_client_state_is_stated(unit, said, unsaid):
    ledger = Ledger(unit)
    ledger.charge(dpa.GaussianDpEvent(1.0))
    plain = st.statement(ledger, 1e-5)
    assert "kept_by_clients" not in plain
    data = st.statement(ledger, 1e-5, has_personal_models=True)
    words = st.in_words(data)
    assert "released to the client itself alone" in words
    assert said in words and unsaid not in words
    assert said in data["kept_by_clients"] and json.loads(json.dumps(data)) == data


@pytest.mark.parametrize("unit", ["client", "record"])
def test_states_of_clients_that_no_claim_covers_are_stated(unit):
    ledger = Ledger(unit)
    ledger.charge(dpa.GaussianDpEvent(1.0))
    words = st.in_words(st.statement(ledger, 1e-5, has_client_states=True))
    # Steps on noised gradients made them under a claim for records.
    assert ("They contain no noise, and no ε covers them" in words) == (unit == "client")
    personal = st.statement(ledger, 1e-5, has_client_states=True, has_personal_models=True)
    assert "states_of_clients" not in personal and "kept_by_clients" in personal


@pytest.mark.parametrize("not_covered", [None, "each client's own model"])
def test_own_models_that_a_claim_for_records_leaves_out_are_not_called_covered(not_covered):
    ledger = Ledger("record")
    ledger.charge(dpa.GaussianDpEvent(1.0))
    given = {"has_personal_models": True, "not_covered": not_covered}
    words = st.in_words(st.statement(ledger, 1e-5, **given))
    assert ("which cover them" in words) == (not_covered is None)
    assert ("no ε covers them: publishing them" in words) == (not_covered is not None)


def test_a_bound_that_is_no_clip_norm_is_stated_as_it_is():
    ledger = Ledger("record")
    ledger.charge(dpa.GaussianDpEvent(1.0))
    words = st.in_words(st.statement(ledger, 1e-5, contribution="1.001/(0.5·k)"))
    assert "The bound on one contribution is 1.001/(0.5·k). 1 release is" in words


@pytest.mark.parametrize(
    ("trust", "rests"),
    [
        *(("honest_but_curious", True), ("secure_aggregation", True), ("gamma_shares", True)),
        *(("server", False), ("client", False)),
    ],
)
def test_rounds_whose_masks_fail_are_a_part_of_delta(trust, rests):
    """In each of 3 rounds: a claim that rests on masks fails with them."""
    ledger = Ledger("client", "zero_out")
    ledger.charge(dpa.GaussianDpEvent(2.0), count=3)
    facts = {"form": "masked", "num_neighbors": 6, "colluders": 3, "dropouts": 2}
    facts |= {"keys": "agreed", "secrecy_failure": 2e-3}
    data = st.statement(ledger, 1e-5, trust=trust, secure_aggregation=facts)
    plain = st.statement(ledger, 1e-5, trust=trust)
    assert data["epsilon"] == plain["epsilon"] and plain["dp_delta"] == 1e-5
    assert data["dp_delta"] == pytest.approx(6.01e-3 if rests else 1e-5, rel=1e-12)
    assert data["dp_delta_per_unit"] == [data["dp_delta"]]
    words = st.in_words(data)
    assert ("**δ = 0.00601**" in words) == rests
    said = "at most 0.002; δ includes 0.006 for all rounds"
    assert (said in words) == ("dp_delta_of_masks" in data) == rests
    certain = st.statement(
        ledger, 1e-5, trust=trust, secure_aggregation=facts | {"secrecy_failure": 0.0}
    )
    assert certain["dp_delta"] == 1e-5 and "dp_delta_of_masks" not in certain
    assert "fails to keep" not in st.in_words(certain)
    sure = st.statement(
        ledger, 1e-5, trust=trust, secure_aggregation=facts | {"secrecy_failure": 0.9}
    )
    assert sure["dp_delta"] == (1.0 if rests else 1e-5)


def test_masks_may_fail_in_the_rounds_of_each_copy_of_a_record():
    facts = {"form": "masked", "num_neighbors": 6, "colluders": 3, "dropouts": 2}
    facts |= {"keys": "agreed", "secrecy_failure": 1e-3}
    for counts in ((2, 2, 2), (2, 2, 1)):
        ledger = Ledger("record", "zero_out", 3)
        for unit, count in enumerate(counts):
            ledger.charge(dpa.GaussianDpEvent(2.0), units=[unit], count=count)
        given = {"num_shared": 4, "most_holders": 2, "trust": "gamma_shares"}
        found = [
            st.statement(ledger, 1e-5, **given, **more)["shared_records"]["dp_delta"]
            for more in ({}, {"secure_aggregation": facts})
        ]
        assert found[1] - found[0] == pytest.approx(2 * 2 * 1e-3)


def test_a_statement_says_which_form_of_secure_aggregation_ran():
    ledger = Ledger("client", "zero_out")
    ledger.charge(dpa.GaussianDpEvent(2.0))
    facts = {"form": "masked", "num_neighbors": 6, "colluders": 3, "dropouts": 2}
    for form, keys, words in (
        ("masked", "agreed", "every mask was made and removed, under masks with 6 random"),
        ("cancelled", "simulated", "were left out of the simulation, under masks with 6 random"),
    ):
        given = facts | {"form": form, "keys": keys}
        data = st.statement(ledger, 1e-5, trust="honest_but_curious", secure_aggregation=given)
        text = st.in_words(data)
        assert words in text and "that collude with the server is at most 3. If more than 2" in text
        assert ("simulated" in text.partition("Key agreement")[2]) == (keys == "simulated")
    ledger.charge(poisson(0.1, 2.0))
    with pytest.raises(ValueError, match="such a server knows who was drawn"):
        st.statement(ledger, 1e-5, trust="honest_but_curious")


def cohorts_of(sampler, rounds=3):
    """The charges of a sampler's cohorts of two of four clients, as an account makes them."""
    joined = participation(sampler, 4, 2.0)
    relation = "zero_out" if sampler.varies else "replace_one"
    ledger = Ledger("client", relation, num_units=1 if sampler.charges_all else 4)
    event = joined.event(dpa.GaussianDpEvent(3.0))
    if sampler.charges_all:
        ledger.charge(event, count=rounds)
        return ledger
    drawn = [[0, 1], [2, 3], [0, 1]][:rounds]
    for cohort in drawn:
        ledger.charge(event, units=cohort)
    return ledger


@pytest.mark.parametrize(
    ("sampler", "kept_secret"),
    [
        (sampling.poisson(), ["which", "how many"]),
        (sampling.fixed_size(), ["which"]),
        (sampling.full_participation(), []),
        (sampling.cyclic(), []),
        (sampling.min_separated(2), []),
        (sampling.without_amplification(sampling.poisson()), []),
        (sampling.without_amplification(sampling.fixed_size()), []),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_draws_are_secret_where_the_claim_rests_on_them_and_nowhere_else(sampler, kept_secret):
    """A table of releases by client, as cyclic cohorts have, shows who was drawn."""
    ledger = cohorts_of(sampler)
    words = st.in_words(st.statement(ledger, 1e-5))
    assert ("must stay hidden" in words) == bool(kept_secret)
    assert all(f"{what} units were drawn" in words for what in kept_secret)
    has_table = np.ptp(ledger.num_compositions) > 0
    assert ("is no secret: draws depend on no data" in words) == has_table
    assert "keeps secret" not in words
    paper = for_paper([st.statement(ledger, 1e-5)]).latex
    assert ("stay hidden" in paper) == bool(kept_secret)


def test_an_account_with_fewer_releases_than_rounds_says_why():
    ledger = Ledger("record", "zero_out", num_units=2)
    ledger.charge(dpa.GaussianDpEvent(3.0))
    data = st.statement(ledger, 1e-5, reads_once=True)
    for text in (st.in_words(data), for_paper([data]).latex.replace("$", "")):
        assert "1 release is composed" in text and "1 releases" not in text
        assert "Each record is read in one round only" in text
    assert "read in one round" not in st.in_words(st.statement(ledger, 1e-5))


@pytest.mark.parametrize(
    ("budget", "calibrated", "words"),
    [
        (None, True, None),
        # ε of five releases is 2.5 times that of one.
        (4.0, True, r"Of a budget of ε = 4, 0 to 2\.\d+ was spent: (\d+) % to 100 % of it was not"),
        ([4.0, 8.0, 2.0], False, r"Of a budget of ε = 2 to 8, 0 to 2\.\d+ was spent: (\d+) % to"),
    ],
)
def test_what_was_not_used_of_a_budget_is_said(budget, calibrated, words):
    ledger = Ledger("record", "zero_out", num_units=3)
    ledger.charge(dpa.GaussianDpEvent(4.0), units=[0, 1], count=[2, 5])
    facts = {"assumes_every_round": True} if calibrated else {}
    data = json.loads(json.dumps(st.statement(ledger, 1e-5, budget=budget, **facts)))
    text = st.in_words(data)
    found = re.search(words, text) if words else None
    assert bool(found) == (words is not None) == ("Of a budget" in text)
    assert ("as if every client took part" in text) == (calibrated and words is not None)
    if found:
        left = 1 - ledger.epsilon(1e-5) / np.asarray(budget)
        assert int(found[1]) <= 100 * left.min() < int(found[1]) + 1
        assert "Of a budget for" in for_paper([data]).latex


def test_a_budget_that_was_spent_is_not_called_unused():
    ledger = Ledger("client", "zero_out")
    ledger.charge(dpa.GaussianDpEvent(2.0))
    spent = float(ledger.epsilon(1e-5)[0])
    text = st.in_words(st.statement(ledger, 1e-5, budget=spent * 1.001))
    assert "was spent." in text and "not used" not in text
    assert "Of a budget" not in st.in_words(st.statement(ledger, 1e-5, budget=np.inf))


def test_a_delta_that_is_not_below_the_share_of_a_unit_is_warned_of():
    """Publishing one of n at random is private at ε = 0 and δ = 1/n."""
    assert large_delta("client", 0.1, 40).startswith("δ = 0.1 is too large for 40 clients: publish")
    assert large_delta("client", 1 / 40, 40) and not large_delta("client", 0.9999 / 40, 40)
    sizes = np.array([5, 300, 40])
    text = large_delta("record", 0.01, sizes)
    assert "the 300 records of a client (1 of 3 clients)" in text and "below 1/300" in text
    assert not large_delta("record", [0.1, 1e-3, 1e-2], sizes)
    assert "40 records" in large_delta("record", [0.1, 1e-3, 3e-2], sizes)
    assert not large_delta("record", 1e-5, [0, 0])
    ledger = Ledger("record", "zero_out", num_units=3)
    ledger.charge(dpa.GaussianDpEvent(2.0))
    data = st.statement(ledger, 0.01, num_units=sizes)
    assert f"**Warning**: {text}." in st.in_words(data)
    assert "too large for the 300 records" in for_paper([data]).latex
    assert "Warning" not in st.in_words(st.statement(ledger, 1e-4, num_units=sizes))
    # Masks that may fail add to it.
    masks = {"form": "masked", "num_neighbors": 6, "colluders": 1, "dropouts": 0, "keys": "agreed"}
    facts = {"secure_aggregation": masks | {"secrecy_failure": 0.2}, "trust": "secure_aggregation"}
    ledger = Ledger("client", "zero_out")
    ledger.charge(dpa.GaussianDpEvent(2.0))
    assert "large_delta" in st.statement(ledger, 1e-6, num_units=10, **facts)


def test_a_server_that_adds_the_noise_sees_sums_alone_under_masks():
    ledger = Ledger("client", "zero_out")
    ledger.charge(dpa.GaussianDpEvent(2.0))
    facts = {"form": "masked", "num_neighbors": None, "colluders": 1, "dropouts": 0}
    facts |= {"keys": "agreed", "secrecy_failure": 0.0}
    masked = st.in_words(st.statement(ledger, 1e-5, secure_aggregation=facts))
    plain = st.in_words(st.statement(ledger, 1e-5))
    for words, is_masked in ((masked, True), (plain, False)):
        assert ("sees the sum of all clipped contributions" in words) == is_masked
        assert ("sees every clipped contribution" in words) != is_masked
