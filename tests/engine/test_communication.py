"""Bytes that clients and server send each other: what messages hold, of every algorithm."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, VARIANTS
from marks import later, slow, telling
from references import reference
from small_problem import (
    COHORT,
    NUM_CLIENTS,
    NUM_FEATURES,
    NUM_MODELS,
    ROUNDS,
    make_data,
    make_model,
    plain_trainer,
)
from small_problem import KEY as SEED

from fedjax_dp import algorithms, models
from fedjax_dp.algorithms import registry
from fedjax_dp.algorithms.base import (
    ClientOutput,
    ClientState,
    FederatedAlgorithm,
    Stages,
    Training,
)
from fedjax_dp.algorithms.jump_start import SHARED
from fedjax_dp.algorithms.r_dpcfl import Stage
from fedjax_dp.clients import cast, keep_largest, local_trainer, scale_update, sparsify
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.client_data import PublicClient
from fedjax_dp.core import masks
from fedjax_dp.core.masks import Sparse
from fedjax_dp.core.messages import ENCODINGS, Known, SentIf, counts_of
from fedjax_dp.data import participants, sampling
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine import ExecutionConfig, Fate, anderson, federation, population_of, simulation
from fedjax_dp.engine.accounts.communication import communication, meter_of
from fedjax_dp.engine.record import MessageCounts, RoundInfo, RoundRecord
from fedjax_dp.privacy.mechanisms.clipping import make_adaptive_clipping
from fedjax_dp.privacy.mechanisms.distributed import make_plan
from fedjax_dp.server.base import Stacked, Summed, stateless, update_alone
from fedjax_dp.server.masking import gradient_mask
from fedjax_dp.server.mean import uniform_mean
from fedjax_dp.server.private import adaptive_gaussian_mean, discrete_mean, gaussian_mean
from fedjax_dp.server.secure import all_pairs, fixed_point, masked

MB = 1e6
KEY = jax.random.key(0)
# What the paper takes a ResNet-18 for: 44.6 MB of float32.
PUBLISHED = 11_150_000
NOTHING_COUNTED = RoundInfo(None, {}, {}, {})


def summed(contribute):
    return Summed(
        stateless, contribute, lambda s, n, total, key: (s, total, {}), message=update_alone
    )


def stacked(contribute):
    def combine(state, numbers, stack, close):
        return state, jnp.sum(stack), {}

    return Stacked(stateless, contribute, combine, message=update_alone)


def sending(message_of, num_clients, *, own=None, broadcast=None, aggregator=summed, **declared):
    """An algorithm whose clients send what a function of their state and themselves gives."""

    def client(sent, own, client, hyper, key):
        message, own = message_of(own, client)
        return ClientOutput(message, jnp.float32(1), own)

    def contribute(state, numbers, update, sender):
        # Something of every array is read, so that all of it counts as sent.
        return sum((jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(update)), jnp.float32(0))

    return FederatedAlgorithm(
        name="sending",
        init=lambda key: {"model": jnp.zeros(3), "moment": jnp.zeros(5)},
        broadcast=broadcast or (lambda server, client: ()),
        client=client,
        aggregator=aggregator(contribute),
        server_step=lambda server, total, hyper, round, key: (server, {}),
        training=Training(LocalConfig(0.1, 1, 1), lambda size, config: jnp.int32(1)),
        client_state=None
        if own is None
        else ClientState(lambda server: own, known=lambda own: own),
        **declared,
    )


def data_of(num_clients):
    return FederatedData.from_clients([{"x": np.zeros((2, 1), np.float32)}] * num_clients)


def compiled(algorithm, num_clients, execution=ExecutionConfig()):
    all_clients = participants.participation(sampling.full_participation(), num_clients)
    return simulation(algorithm, data_of(num_clients), all_clients, execution)


def counted(sim, rounds):
    _, record, info = sim.run(sim.init(KEY), KEY, rounds)
    return communication(sim, record, info)


def record_of(fates, stages=None):
    """A record of rounds, `[rounds, slots]`, without having played them."""
    fates = np.array(fates, np.int8)
    num_rounds = len(fates)
    return RoundRecord(
        clients=np.where(fates == Fate.EMPTY, -1, 0),
        fate=fates,
        overflow=np.zeros(num_rounds, np.int32),
        stage=np.zeros(num_rounds, np.int32) if stages is None else np.array(stages, np.int32),
        is_released=np.ones(num_rounds, bool),
    )


def own_zeros(client, *shape):
    """Zeros that only the client knows."""
    return jnp.zeros(shape) * client.start.astype(jnp.float32)


# The costs that the papers print.


def test_a_dense_model_of_the_published_size_costs_as_published():
    algorithm = sending(lambda own, client: (own_zeros(client, 1115, 10_000), own), 5)
    meter = meter_of(compiled(algorithm, 5).federation)
    played = record_of([[Fate.CONTRIBUTED] * 5] * 50)
    sent = meter.measure(played, NOTHING_COUNTED)
    assert all(sent.total("up", encoding) / MB == 11_150.0 for encoding in ENCODINGS)
    assert sent.by_type("up") == {"float32": 11_150_000_000}
    assert sent.by_round("up").tolist() == [5 * 44_600_000] * 50
    assert sent.total("down") == 0


@pytest.mark.parametrize(
    ("options", "size"),
    [
        pytest.param({}, 11_181_642, marks=slow),
        pytest.param({"stem": "cifar"}, 11_173_962, marks=slow),
        # Running statistics are averaged, and sent.
        pytest.param({"norm": "batch"}, 11_181_642 + 9_600, marks=telling),
    ],
)
def test_a_dense_resnet_18_of_ours_costs_its_own_size(options, size):
    image = {"x": jax.ShapeDtypeStruct((32, 32, 3), np.float32)}
    model = models.build("resnet18", image, 10, **options)
    trainer = local_trainer(model, LocalConfig(0.1, 2, 1))
    images = {"x": np.zeros((2, 32, 32, 3), np.float32), "y": np.zeros(2, np.int32)}
    data = FederatedData.from_clients([images] * 5)
    joining = participants.participation(sampling.full_participation(), 5)
    meter = meter_of(federation(algorithms.fedavg(model, trainer), population_of(data), joining))
    sent = meter.measure(record_of([[Fate.CONTRIBUTED] * 5] * 50), NOTHING_COUNTED)
    assert sent.total("down") == 50 * 5 * 4 * size
    # Beside its update a client sends what it weighs.
    assert sent.total("up") == 50 * 5 * 4 * (size + 1)


@pytest.mark.parametrize("size", [11_150, pytest.param(PUBLISHED, marks=slow)])
def test_the_ideal_schedule_of_pruning_costs_as_published(size):
    """Of what is left, a tenth goes with each of 25 participations, until 90 % are gone."""

    def message(own, client):
        alive, times = own
        alive = jnp.where(times < 22, alive - alive // 10, alive)
        mask = jnp.arange(size) < alive
        return Sparse(jnp.where(mask, own_zeros(client, size), 0.0), mask), (alive, times + 1)

    start = (jnp.int32(size), jnp.int32(0))
    sent = counted(compiled(sending(message, 10, own=start), 10), 25)
    left, alive = size, []
    for times in range(25):
        left -= left // 10 if times < 22 else 0
        alive.append(left)
    assert sent.by_round("up", "values").tolist() == [10 * 4 * a for a in alive]
    if size == PUBLISHED:
        ideal = (sum(0.9**m for m in range(1, 23)) + 3 * 0.9**22) / 25
        np.testing.assert_allclose(sent.total("up", "values"), ideal * 11_150 * MB, rtol=1e-5)
        # The specification multiplies by the share that it prints, of four digits.
        share = round(sent.total("up", "values") / (11_150 * MB), 4)
        assert share == 0.3364 and round(share * 11_150) == 3751


# What a message holds.


def mixed(own, client):
    """16 weights of which `own` are alive, and 3 biases that are whole."""
    mask = jnp.arange(16) < own
    values = {"b": jnp.ones(3) * client.start, "w": jnp.where(mask, 1.0, 0.0) * client.start}
    return Sparse(values, {"b": None, "w": mask}), own - 1


LAYOUTS = {
    "alone": ExecutionConfig(clients_per_chunk=1),
    "chunks": ExecutionConfig(clients_per_chunk=2),
    "streamed": ExecutionConfig(clients_per_chunk=2, placement="host"),
    "devices": ExecutionConfig(devices=None, clients_per_chunk=1),
    "blocks": ExecutionConfig(rounds_per_call=3),
}


@pytest.mark.parametrize(
    ("layout", "aggregator"),
    later(
        [(layout, aggregator) for layout in LAYOUTS for aggregator in (summed, stacked)],
        but=[("chunks", stacked)],
        soon=[("chunks", summed), ("streamed", summed)],
    ),
)
def test_masked_arrays_are_counted_by_what_is_alive_in_every_layout(layout, aggregator):
    algorithm = sending(mixed, 3, own=jnp.int32(10), aggregator=aggregator)
    sim = compiled(algorithm, 3, LAYOUTS[layout])
    sent = counted(sim, 4)
    alive = np.array([10, 9, 8, 7])
    expected = {
        "dense": 3 * 4 * (16 + 3 + 0 * alive),
        "bitmap": 3 * (4 * alive + 12 + 2),
        "index": 3 * (8 * alive + 12),
        "values": 3 * (4 * alive + 12),
        "smallest": 3 * (4 * alive + 12 + 2),
    }
    for encoding in ENCODINGS:
        assert sent.by_round("up", encoding).tolist() == expected[encoding].tolist(), encoding
    kept = 3 * int(alive.sum())
    assert sent.by_type("up", "bitmap") == {"bool": 3 * 4 * 2, "float32": 4 * (kept + 36)}
    assert sent.by_type("up", "index") == {"float32": 4 * (kept + 36), "int32": 4 * kept}
    assert sent.total("down") == 0 and sent.total("both", "dense") == 3 * 4 * 19 * 4
    assert sim.num_traces() == 1


@telling
@pytest.mark.parametrize("layout", ["chunks", "streamed"])
def test_masks_of_what_is_sent_down_are_those_that_clients_keep(layout):
    """The model without what a client has pruned: 3 numbers, of which own and index keep some."""

    def broadcast(server, client):
        mask = jnp.arange(3) < client.known + client.index
        return Sparse(jnp.where(mask, server["model"], 0.0), mask)

    algorithm = sending(lambda own, client: ((), own + 1), 2, own=jnp.int32(0), broadcast=broadcast)
    sent = counted(compiled(algorithm, 2, LAYOUTS[layout]), 4)
    alive = [0 + 1, 1 + 2, 2 + 3, 3 + 3]
    assert sent.by_round("down", "values").tolist() == [4 * a for a in alive]
    assert sent.by_round("down", "bitmap").tolist() == [4 * a + 2 for a in alive]
    assert sent.total("up") == 0


def test_nothing_is_counted_in_rounds_whose_messages_are_known_by_their_shapes():
    sim = compiled(sending(lambda own, client: (own_zeros(client, 2), own), 2), 2)
    _, record, info = sim.run(sim.init(KEY), KEY, 2)
    assert info.messages is None
    assert communication(sim, record, info).total() == 2 * 2 * 8


def test_the_smallest_encoding_is_chosen_for_every_message():
    alive = np.array([0, 1, 15, 16])

    def message(own, client):
        mask = jnp.arange(16) < jnp.asarray(alive)[client.index]
        return Sparse(jnp.where(mask, own_zeros(client, 16), 0.0), mask), own

    sent = counted(compiled(sending(message, 4), 4), 1)
    # An index list for none, a bitmap for 1 and 15 of 16, everything for all.
    assert sent.total("up") == 0 + (4 + 2) + (60 + 2) + 64
    assert sent.by_type("up") == {"bool": 4, "float32": 4 + 60 + 64}
    one = 4 * alive
    assert sent.total("up", "index") == 2 * one.sum() and sent.total("up", "dense") == 4 * 64


def test_bytes_of_ten_thousand_large_clients_do_not_overflow():
    algorithm = sending(
        lambda own, client: (
            Sparse(own_zeros(client, 1115, 10_000), jnp.ones((1115, 10_000))),
            own,
        ),
        1,
    )
    meter = meter_of(compiled(algorithm, 1).federation)
    counts = np.full((2, 10_000), PUBLISHED - 1, np.int32)
    info = NOTHING_COUNTED._replace(
        messages=MessageCounts(np.ones((2, 10_000), bool), (counts,), ())
    )
    sent = meter.measure(record_of([[Fate.CONTRIBUTED] * 10_000] * 2), info)
    assert sent.by_round("up", "values").tolist() == [10_000 * 4 * (PUBLISHED - 1)] * 2


def test_clients_that_began_receive_and_those_that_finished_send():
    """An update of 7 numbers up, 3 down; late and lost updates count as whole."""
    algorithm = sending(
        lambda own, client: (own_zeros(client, 7), own),
        6,
        broadcast=lambda server, client: server["model"],
    )
    meter = meter_of(compiled(algorithm, 6).federation)
    # Empty, in the sum, not finite, not started, lost, late.
    sent = meter.measure(record_of([list(Fate), [Fate.EMPTY] * 6]), NOTHING_COUNTED)
    assert sent.by_round("up").tolist() == [3 * 28, 0]
    assert sent.by_round("down").tolist() == [4 * 12, 0]
    masked = meter_of(compiled(sending(mixed, 6, own=jnp.int32(10)), 6).federation)
    is_counted = np.array([[False, True, True, False, False, False]])
    counts = np.array([[9, 2, 3, 9, 9, 9]], np.int32)
    info = NOTHING_COUNTED._replace(messages=MessageCounts(is_counted, (counts,), ()))
    sent = masked.measure(record_of([list(Fate)]), info)
    assert sent.total("up", "bitmap") == (8 + 12 + 2) + (12 + 12 + 2) + 4 * 19


def test_nothing_is_sent_in_a_silent_stage():
    def message(own, client):
        update, own = mixed(own, client)
        return SentIf(update, client.stage == 0), own

    algorithm = sending(
        message,
        2,
        own=jnp.int32(10),
        stages=Stages(lambda server, hyper, round_index: jnp.where(round_index < 2, 1, 0)),
        broadcast=lambda server, client: SentIf(server["model"], client.stage == 0),
    )
    sent = counted(compiled(algorithm, 2), 4)
    assert sent.by_round("up", "values").tolist() == [0, 0, 2 * 4 * 11, 2 * 4 * 10]
    assert sent.by_round("down").tolist() == [0, 0, 24, 24]


def test_what_the_server_knows_is_not_sent():
    def message(own, client):
        known = Known({"ones": jnp.ones(5), "round": client.round + client.index})
        return {"own": own_zeros(client, 2), "known": known}, own

    assert counted(compiled(sending(message, 2), 2), 1).total("up") == 2 * 8


# Every algorithm. The model of the cases has 4 parameters, p = 16 bytes; a weight is 4 more.
P, W = 16, 4
UP_AND_DOWN = {
    # The mean is weighted: p and the weight up, p down, whatever the server's optimiser keeps.
    **dict.fromkeys(
        (
            *("fedavg", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "fedprox", "propfair"),
            *("dp_sgd", "record_dp_fedavg", "minimum_epsilon", "weiavg", "pfa"),
            *("robust_hdp", "noise_oracle"),
        ),
        (P + W, P),
    ),
    # Clipped: all weigh the same.
    "dp_fedavg": (P, P),
    "blur_lus": (P, P),
    "feddyn": (P, P),
    "mr_mtl": (P, P),
    # How many clients there are, and the size of the smallest of them, go with the model.
    **dict.fromkeys(("warm_start_averaging", "retrained_averaging"), (P + W, P + 2 * 4)),
    # Twice: control variates.
    "scaffold": (2 * P, 2 * P),
    # The loss too, and what each method weighs by.
    "afl": (P + W + 4, P),
    "q_ffl": (P + 2 * 4, P),
    "term": (P + 5 * 4, P + 4),
    # Points are kept at home.
    **dict.fromkeys(
        ("splitting", "fedsplit", "fedpi", "fedrp", "reflected_fedavg", "reflected_fedprox"),
        (P + W, P),
    ),
    # All of 2 models down; one, with its number, up.
    "ifca": (P + W + 4, 2 * P),
    # Who is in which cluster is public, or found by the server, which sends it.
    "o_dpcfl": (P + W, P),
    "km_cdpfl": (P + W, P + 4),
    # 8 public inputs in 3 rounds make 3 a round, of 2 classes.
    "ae_dpfl": (3 * 2 * 4, P),
    "local_only": (0, 0),
    # The bias stays at home; what a client keeps as its own model is not sent.
    **dict.fromkeys(("fedbn", "fedper", "fedrep"), (P - 4 + W, P - 4)),
    "ditto": (P + W, P),
    # Whole; in other encodings as the mask says.
    "lottery_fl": (P + W, P),
    **dict.fromkeys(("fed_ltn", "jump_start"), (P - 4 + W, P - 4)),
}
# All models where clients choose, one elsewhere.
CLUSTERED = ("r_dpcfl", "rc_dpfl", "f_cdpfl")


@pytest.mark.parametrize("has_jumped", [False, True])
def test_a_mask_that_a_client_found_alone_is_not_known_to_the_server(has_jumped):
    algorithm = VARIANTS["a jump with own masks"].make(make_model())
    server = algorithm.init(KEY)._replace(has_jumped=jnp.bool_(True))
    own = algorithm.client_state.init(server)
    kept = masks.packed({"b": None, "w": jnp.array([True, False, False])})
    own = own._replace(inner=own.inner._replace(mask=kept), has_jumped=jnp.bool_(has_jumped))
    public = PublicClient(jnp.int32(5), jnp.int32(0), 12, stage=jnp.int32(SHARED))
    message = algorithm.message_to(server, own, public)
    # 1 message is sent, with as many weights as are left by what the client has sent before.
    assert [int(n) for n in counts_of(message)] == [1, 1 if has_jumped else NUM_FEATURES]


@functools.cache
def meter_of_case(name):
    case = CASES[name]
    known = population_of(case.data(), case.validation())
    return meter_of(federation(case.make(make_model()), known, case.participation()))


def test_every_algorithm_is_listed():
    assert {*UP_AND_DOWN, *CLUSTERED, "centralized"} == set(registry.ALGORITHMS)


@pytest.mark.parametrize("name", UP_AND_DOWN)
def test_the_bytes_of_an_algorithm_are_those_counted_by_hand(name):
    meter, (up, down) = meter_of_case(name), UP_AND_DOWN[name]
    played = record_of([[Fate.CONTRIBUTED] * 3 + [Fate.EMPTY]])
    if name == "jump_start":  # Its first stage is silent.
        played = played._replace(stage=np.ones_like(played.stage))
    is_counted = np.array([[True, True, True, False]])
    counts = [
        tuple(np.full((1, 4), most, np.int32) for most in way.most)
        for way in (meter.up, meter.down)
    ]
    info = NOTHING_COUNTED._replace(messages=MessageCounts(is_counted, *counts))
    sent = meter.measure(played, info)
    assert sent.total("up", "dense") == 3 * up
    assert sent.total("down", "dense") == 3 * down


def test_rounds_in_which_nothing_is_sent_are_rounds():
    played = record_of([[Fate.CONTRIBUTED]] * 3)
    sent = meter_of_case("local_only").measure(played, NOTHING_COUNTED)
    assert sent.by_round().tolist() == [0, 0, 0] and sent.by_type() == {}


def test_one_party_sends_nothing():
    sent = meter_of_case("centralized").measure(record_of([[Fate.CONTRIBUTED]]), NOTHING_COUNTED)
    assert sent.total() == 0


@telling
@pytest.mark.parametrize("name", CLUSTERED)
def test_models_are_sent_to_choose_from_or_one_by_one(name):
    ref = reference(name)
    record, sent = ref.record, communication(ref.sim, ref.record, ref.info)
    selecting = {"f_cdpfl": 0}.get(name, 2)
    for i in range(ROUNDS):
        clients = int(record.num_drawn[i])
        # The index of the model that was trained goes with the update.
        assert sent.by_round("up")[i] == clients * (P + W + 4)
        # Where clients draw from soft clusters they get all models, and their chances.
        is_soft = name != "f_cdpfl" and record.stage[i] == Stage.SOFT
        is_choosing = int(record.stage[i]) == selecting
        num_models = NUM_MODELS if is_choosing or is_soft else 1
        chances = NUM_MODELS * 4 if is_soft else 0
        assert sent.by_round("down")[i] == clients * (num_models * P + chances)
    assert any(int(s) == selecting for s in record.stage)


@pytest.mark.parametrize("name", CLUSTERED)
def test_one_of_several_models_is_counted_as_often_as_it_is_sent(name):
    meter = meter_of_case(name)
    assert one_message(meter.up) == {"float32": P + W, "int32": 4}
    chances = [0] * (len(meter.down.rates) - 1)
    for num_models in (1, 2):
        sent = meter.down.bytes_of(np.array([num_models, *chances]), "values")
        assert sent["float32"] == num_models * P


def test_an_accelerated_federation_sends_what_it_sent_before():
    case = CASES["fedavg"]
    plain = federation(case.make(make_model()), case.data(), case.participation())
    with pytest.warns(UserWarning, match="heuristic"):
        faster = anderson(plain, memory=1)
    assert meter_of(faster) == meter_of(plain)


def test_a_mean_that_all_clients_get_is_not_sent_twice():
    """Points that move when the round is over: p and whether any client came, to all."""
    model = make_model()
    algorithm = algorithms.splitting(
        model, plain_trainer(model), client_map="gradient", form="centralised"
    )
    case = CASES["fedavg"]
    meter = meter_of(federation(algorithm, case.data(), case.participation()))
    sent = meter.measure(record_of([[Fate.CONTRIBUTED] * 2 + [Fate.EMPTY]]), NOTHING_COUNTED)
    assert sent.total("down") == NUM_CLIENTS * (P + 4)


# What aggregators and transforms make of an update.


def with_aggregator(aggregator):
    model = make_model()
    algorithm = algorithms.dp_fedavg(model, plain_trainer(model), aggregator=aggregator)
    joining = participants.participation(sampling.poisson(), NUM_CLIENTS, COHORT)
    return meter_of(federation(algorithm, make_data(), joining))


def meter_with(aggregator=None, *, make=algorithms.fedavg, transforms=(), **options):
    """The meter of an algorithm in which all clients take part and transform their updates."""
    trainer = plain_trainer(make_model(), update_transforms=transforms)
    algorithm = make(make_model(), trainer, aggregator=aggregator, **options)
    all_clients = participants.participation(sampling.full_participation(), NUM_CLIENTS)
    return meter_of(federation(algorithm, make_data(), all_clients))


def one_message(tariff, encoding="dense"):
    """The bytes of one message, as large as it can be."""
    found = tariff.bytes_of(np.array(tariff.most), encoding)
    return {name: int(num_bytes) for name, num_bytes in found.items()}


@pytest.mark.parametrize("bits", [12, 16])
def test_whole_numbers_modulo_2_to_the_b_take_b_bits_each(bits):
    plan = make_plan(4, 0.5, 1.0, num_clients=8, bits=bits)
    structure = {"b": jnp.zeros(()), "w": jnp.zeros(3)}
    meter = with_aggregator(discrete_mean(structure, plan, COHORT, varies=True))
    assert one_message(meter.up) == {f"uint{bits}": -(-plan.dimension * bits // 8)}


def test_votes_under_noise_are_sent_beside_the_update():
    mean = gaussian_mean(0.5, 1.0, COHORT)
    assert one_message(with_aggregator(mean).up) == {"float32": P}
    assert one_message(with_aggregator(gradient_mask(mean)).up) == {"float32": 2 * P}


def test_a_clip_norm_that_adapts_is_sent_and_answered_with_one_bit():
    mean = adaptive_gaussian_mean(make_adaptive_clipping(COHORT, count_stddev=2.0), 1.0)
    meter = with_aggregator(mean)
    assert one_message(meter.up) == {"float32": P, "uint1": 1}
    assert one_message(meter.down) == {"float32": P + 4}


def transformed(*transforms, make=algorithms.fedavg, num_features=100):
    """Bytes up of one round of clients that transform their update of 100 weights and a bias."""

    def init(key):
        return {"b": jnp.zeros(()), "w": jax.random.normal(key, (num_features,))}

    model = models.Model.from_functions(
        init,
        lambda params, x: x @ params["w"] + params["b"],
        loss="sigmoid_binary_cross_entropy",
        name="linear",
    )
    chain = [t(model) if callable(t) and not hasattr(t, "apply") else t for t in transforms]
    rng = np.random.default_rng(0)
    rows = {"x": rng.normal(size=(6, num_features)).astype(np.float32)}
    rows["y"] = np.array([0, 1, 0, 1, 0, 1], np.float32)
    trainer = local_trainer(model, LocalConfig(0.1, 2, 1), update_transforms=chain)
    data = FederatedData.from_clients([rows] * 2)
    joining = participants.participation(sampling.full_participation(), 2)
    return counted(simulation(make(model, trainer), data, joining), 1)


@pytest.mark.parametrize(
    ("transforms", "alive", "width", "name"),
    [
        pytest.param((keep_largest(0.1),), 10, 4, "float32", marks=slow),
        pytest.param((lambda model: sparsify(model, 0.75),), 25, 4, "float32", marks=telling),
        pytest.param((cast("bfloat16"),), None, 2, "bfloat16", marks=slow),
        pytest.param((keep_largest(0.1), cast("float16")), 10, 2, "float16", marks=telling),
        # Numbers that are scaled need all of their digits again; zeros stay what they are.
        pytest.param(
            (keep_largest(0.1), cast("float16"), scale_update(0.3)),
            *(10, 4, "float32"),
            marks=telling,
        ),
    ],
)
def test_what_a_transform_drops_or_rounds_is_not_sent(transforms, alive, width, name):
    sent = transformed(*transforms)
    # The bias, one number, and the weight go as they are.
    beside = {"float32": 2 * 8}
    of_weights = 2 * width * (100 if alive is None else alive)
    expected = {name: of_weights}
    expected = {n: expected.get(n, 0) + beside.get(n, 0) for n in {*expected, *beside}}
    assert sent.by_type("up", "values") == expected
    assert sent.total("up", "dense") == 2 * (100 * width + 8)
    if alive is not None:
        assert sent.total("up", "bitmap") == 2 * (alive * width + 13 + 8)


@telling
def test_an_update_that_is_scaled_after_rounding_is_sent_in_its_own_type():
    sent = transformed(cast("bfloat16"), make=algorithms.term)
    assert set(sent.by_type("up")) == {"float32"}


def test_control_variates_of_a_rounded_update_are_sent_in_their_own_type():
    options = {"num_clients": NUM_CLIENTS, "control": "gradient"}
    meter = meter_with(make=algorithms.scaffold, transforms=[cast("bfloat16")], **options)
    # The weights of the update; its bias, and the control variate of each parameter.
    expected = {"bfloat16": 2 * NUM_FEATURES, "float32": 4 * (NUM_FEATURES + 2)}
    assert one_message(meter.up) == expected


@pytest.mark.parametrize("transform", [keep_largest(0.5), cast("bfloat16")])
@pytest.mark.parametrize("mean", [uniform_mean(), gaussian_mean(1.0, 1.0, NUM_CLIENTS)])
def test_masked_messages_are_words_whatever_a_transform_dropped_or_rounded(mean, transform):
    mean = masked(mean, fixed_point(NUM_CLIENTS), all_pairs(NUM_CLIENTS))
    whole = meter_with(mean).up
    assert meter_with(mean, transforms=[transform]).up == whole
    assert set(one_message(whole)) == {"uint32"}


@telling
def test_tickets_are_counted_by_what_is_alive():
    """LotteryFL on the case: as many numbers up and down as the masks of those who sent keep."""
    sim, key = reference("lottery_fl").sim, jax.random.key(SEED)
    state = sim.init(key)
    for _ in range(ROUNDS):
        before = np.asarray(state.clients["w"]).copy()
        state, record, info = sim.run(state, key, 1)
        sent = communication(sim, record, info)
        drawn = record.clients[0][record.clients[0] >= 0]
        alive = [
            int(np.unpackbits(np.asarray(rows)[drawn], axis=1)[:, :NUM_FEATURES].sum())
            for rows in (before, state.clients["w"])
        ]
        biases = 4 * len(drawn)
        assert sent.total("down", "values") == 4 * alive[0] + biases
        # A client has its own mask, and sends it.
        assert sent.total("down", "bitmap") == sent.total("down", "values")
        assert sent.total("up", "bitmap") == sent.total("up", "values") + len(drawn)
        assert sent.total("up", "values") == 4 * alive[1] + biases + W * len(drawn)


def test_what_cannot_be_asked_for_is_refused_by_name():
    sent = meter_of_case("fedavg").measure(record_of([[Fate.CONTRIBUTED]]), NOTHING_COUNTED)
    with pytest.raises(ValueError, match="direction must be one of"):
        sent.total("sideways")
    for asked in (sent.by_round, sent.by_type, sent.total):
        with pytest.raises(ValueError, match="encoding must be one of"):
            asked("up", "zip")
