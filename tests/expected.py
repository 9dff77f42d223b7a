"""What the oracles expect of a run of the small problem, by name, and where a state holds it."""

from typing import Any, NamedTuple

import numpy as np
from oracles import (
    averaging,
    clustered,
    federated,
    generalization,
    local,
    noise_aware,
    personal,
    private_parts,
)
from oracles.feddyn import feddyn as feddyn_by_hand
from oracles.replay import Replay
from oracles.splitting import ergodic
from oracles.splitting import splitting as splitting_by_hand
from oracles.trimmed_mean import trimmed_mean as trimmed
from small_problem import (
    CLUSTERS,
    COHORT,
    NUM_CLIENTS,
    NUM_FEATURES,
    NUM_MODELS,
    PUBLIC,
    ROUNDS,
    SETTINGS,
    SHAPES,
    theta_of,
)


class Run(NamedTuple):
    """What an oracle reads: the start, the data, the draws."""

    initial: Any
    clients: list
    replay: Replay
    validation: list | tuple = ()
    num_rounds: int = ROUNDS

    @property
    def theta(self):
        """The shared model at the start."""
        return theta_of(self.initial.server.params)

    @property
    def rounds(self):
        """What oracles repeat: the clients, their draws, for how many rounds."""
        return self.clients, self.replay, self.num_rounds

    def sgd(self, settings=SETTINGS, **options):
        return federated.local_sgd(self.clients, self.replay, settings, **options)

    def dp_sgd(self, settings=SETTINGS):
        return federated.local_dp_sgd(self.clients, self.replay, settings)

    def personal(self):
        return personal.trainer(self.clients, self.replay, SETTINGS)


# New records of each client a round, and the regulariser, of averages on growing data.
GROWING_ROWS, GROWING_DECAY = (2, 1, 3, 2, 4, 4), 0.3

# Observers.


def bits(packed):
    return np.unpackbits(np.asarray(packed), axis=-1)[..., :NUM_FEATURES]


def shared_model(state):
    return {"params": theta_of(state.server.params)}


def client_state(state):
    return {"rows": theta_of(state.clients)}


def models(state):
    return {"models": theta_of(state.server.models)}


def models_and_choices(state):
    return models(state) | {"choices": state.clients}


def controls(state):
    own = {"control": theta_of(state.server.control), "controls": theta_of(state.clients)}
    return shared_model(state) | own


def corrections(state):
    own = {"correction": theta_of(state.server.correction), "corrections": theta_of(state.clients)}
    return shared_model(state) | own


def points(state):
    average, own = state.server.average, state.clients.of_point
    params = theta_of(state.server.params)
    return {
        "params": params,
        # Where a client begins next; the start for one that has not joined.
        "points": theta_of(own.part) + np.asarray(own.share)[:, None] * params,
        **({} if average is None else {"average": theta_of(average.mean)}),
    }


def chances(state):
    return models_and_choices(state) | {"chances": state.server.responsibilities}


def own_part(state):
    return shared_model(state) | {"own": np.asarray(state.clients["b"])}


def own_model(state):
    return shared_model(state) | {"own": theta_of(state.clients)}


def trained_models(state):
    return shared_model(state) | {"own": theta_of(state.clients.trained)}


def ticket_and_home(state):
    masks = bits(state.clients.mask["w"])
    return shared_model(state) | {"own": np.asarray(state.clients.home["b"]), "masks": masks}


def ticket_alone(state):
    """Where no client continues with the shared mask."""
    inner = state._replace(server=state.server.inner, clients=state.clients.inner)
    return ticket_and_home(inner) | {"alone": theta_of(state.clients.params)}


def ticket_after_jump(state):
    """A client that has not taken part since the jump continues with the shared mask."""
    found = ticket_alone(state)
    waits = np.asarray(state.server.has_jumped) & ~np.asarray(state.clients.has_jumped)
    shared = bits(state.server.mask["w"])
    return found | {"masks": np.where(waits[:, None], shared, found["masks"])}


# One model.


def fedavg(server=federated.sgd_server, *, settings=SETTINGS, mu=0.0, is_private=False):
    """FedAvg with any server step, and any local training."""

    def expect(run: Run):
        train = run.dp_sgd(settings) if is_private else run.sgd(settings, mu=mu)
        return {"params": federated.fedavg(run.theta, *run.rounds, train, server())}

    return expect


def dp_fedavg(clip_norm, noise_multiplier, *, is_private=False):
    def expect(run: Run):
        train = run.dp_sgd() if is_private else run.sgd()
        numbers = clip_norm, noise_multiplier, COHORT
        return {"params": federated.dp_fedavg(run.theta, run.replay, ROUNDS, train, *numbers)}

    return expect


def blur_lus(run: Run):
    layers = (slice(0, 1), slice(1, 1 + NUM_FEATURES))
    train = federated.blur_lus(run.clients, run.replay, SETTINGS, 0.5, 0.2, 0.4, layers)
    numbers = 0.2, 0.8, COHORT
    return {"params": federated.dp_fedavg(run.theta, run.replay, ROUNDS, train, *numbers)}


def ae_dpfl(run: Run):
    numbers = PUBLIC.astype(np.float64), 0.4, 2, 3
    theta, labels = federated.ae_dpfl(run.theta, *run.rounds, run.sgd(), *numbers)
    return {"params": theta, "labels": labels}


def median(run: Run):
    return {"params": federated.median(run.theta, run.replay, ROUNDS, run.sgd())}


def trimmed_mean(run: Run):
    train, theta = run.sgd(), run.theta
    for r in range(ROUNDS):
        deltas = [train(theta, r, i) - theta for i in run.replay.cohort(r)]
        theta = theta + trimmed(np.array(deltas), 0.4) if deltas else theta
    return {"params": theta}


def feddyn(run: Run):
    train = run.sgd(mu=0.4)
    theta, h, g = feddyn_by_hand(run.theta, NUM_CLIENTS, run.replay, ROUNDS, train, 0.4)
    return {"params": theta, "correction": h, "corrections": g}


def scaffold(run: Run, *combine):
    x, c, c_i = federated.scaffold(run.theta, *run.rounds, run.sgd(), SETTINGS, 0.7, *combine)
    return {"params": x, "control": c, "controls": c_i}


def scaffold_by_gradients(run: Run):
    x, c, c_i = federated.scaffold_by_gradients(run.theta, *run.rounds, SETTINGS, 0.7, 0.6)
    return {"params": x, "control": c, "controls": c_i}


# Under privacy of clients: clip norm, noise multiplier and expected cohort, and the same for an
# update that has a one in it for the model that was chosen.
PRIVATE, PRIVATE_CHOICE = (0.2, 0.8, COHORT), (1.5, 0.1, COHORT)


def scaffold_private(weigh=None):
    def expect(run: Run):
        # One noise for the control variate and, behind it, for the model.
        run.replay.theta_shapes = 2 * SHAPES
        arguments = run.theta, *run.rounds, run.sgd(), SETTINGS, 0.7, PRIVATE, weigh
        x, c, c_i = private_parts.scaffold(*arguments)
        return {"params": x, "control": c, "controls": c_i}

    return expect


def feddyn_private(run: Run):
    arguments = run.theta, *run.rounds, run.sgd(mu=0.4), 0.4, PRIVATE
    theta, h, g = private_parts.feddyn(*arguments)
    return {"params": theta, "correction": h, "corrections": g}


def mr_mtl_private(run: Run):
    theta = theta_of(run.initial.server.mean)
    own, mean = private_parts.mr_mtl(theta, *run.rounds, SETTINGS, 0.5, PRIVATE)
    return {"rows": own, "mean": mean}


def o_dpcfl_private(run: Run):
    run.replay.theta_shapes = [(NUM_MODELS, *shape) for shape in SHAPES]
    theta = theta_of(run.initial.server.models)[0]
    arguments = theta, *run.rounds, run.sgd(), CLUSTERS, PRIVATE
    return {"models": private_parts.o_dpcfl(*arguments)}


def ifca_private(run: Run):
    # The counts are behind the name "count", before "delta".
    run.replay.theta_shapes = [(NUM_MODELS,), *((NUM_MODELS, *shape) for shape in SHAPES)]
    start = theta_of(run.initial.server.models)
    found, choices = private_parts.ifca(start, *run.rounds, run.sgd(), PRIVATE_CHOICE)
    return {"models": found, "choices": choices}


def gma(server=federated.sgd_server, *, mu=0.0, threshold=0.6, **how):
    def expect(run: Run):
        arguments = run.sgd(mu=mu), server(), threshold
        return {"params": generalization.gma(run.theta, *run.rounds, *arguments, **how)}

    return expect


def gma_scaffold(run: Run):
    return scaffold(run, lambda deltas: generalization.mask(deltas, 0.6))


def gma_private(run: Run):
    # One noise for the update and, behind it, for the votes.
    run.replay.theta_shapes = 2 * SHAPES
    numbers = 0.2, 0.8, COHORT, 0.6, 0.5
    return {"params": generalization.noised_gma(run.theta, *run.rounds, run.sgd(), *numbers)}


def afl(run: Run):
    theta, weights = generalization.afl(run.theta, *run.rounds, run.sgd(), 0.3)
    return {"params": theta, "weights": weights}


def term(run: Run):
    theta, risk = generalization.term(run.theta, *run.rounds, run.sgd(), 2.0)
    return {"params": theta, "risk": np.array(risk)}


def q_ffl(run: Run):
    numbers = SETTINGS.learning_rate, 0.5
    return {"params": generalization.q_fedavg(run.theta, *run.rounds, run.sgd(), *numbers)}


def propfair(make_train):
    def expect(run: Run):
        # The margin is so wide that losses lie on either side of it.
        train = make_train(run.clients, run.replay, SETTINGS, 2.0, 1.2)
        return {"params": federated.fedavg(run.theta, *run.rounds, train, federated.sgd_server())}

    return expect


# Of the proximal step.
STEP_SIZE = 0.8


def splitting(
    numbers,
    *,
    phi="prox",
    is_averaged=False,
    is_weighted=False,
    private=None,
):
    """The oracle of the splitting scheme; Φ is a proximal step, SGD or DP-SGD."""

    def expect(run: Run):
        sizes, theta = run.replay.sizes, run.theta

        def prox(r, i, u, mean):
            train = run.sgd(mu=1 / STEP_SIZE)
            return train(mean, r, i, (mean - u) / STEP_SIZE)

        def trained(r, i, u, mean):
            return (run.dp_sgd() if phi == "dp_sgd" else run.sgd())(u, r, i)

        if private is not None:
            _, *draws = run.rounds
            mean, points = private_parts.splitting(prox, theta, sizes, *draws, numbers, private)
            return {"params": mean, "points": points}
        cohorts = [run.replay.cohort(r) for r in range(ROUNDS)]
        weights = sizes.astype(float) if is_weighted else (sizes > 0).astype(float)
        client_map = prox if phi == "prox" else trained
        found = splitting_by_hand(client_map, theta, weights, cohorts, numbers, waits=True)
        start_or_point = np.where(found.joined[:, None], found.points, theta)
        expected = {"params": found.models[-1], "points": start_or_point}
        if is_averaged:
            counts = [sum(weights[i] for i in cohort) > 0 for cohort in cohorts]
            expected["average"] = ergodic(theta, found.models, np.ones(ROUNDS), counts)
        return expected

    return expect


# Means that weigh clients by their noise or their budget: what they declare, three largest public.

EPSILON = (1.0, 2.0, 6.0, 0.5, 5.0, 7.0)
IS_PUBLIC = np.array([False, False, True, False, True, True])


def noise_aware_mean(make_mean):
    """A mean of DP-SGD updates that weighs clients one by one."""

    def expect(run: Run):
        mean = make_mean(run.replay.sizes)
        return {"params": noise_aware.averaged(run.theta, run, ROUNDS, run.dp_sgd(), mean)}

    return expect


def by_weight(weight_of):
    def make_mean(sizes):
        weights = np.asarray(weight_of(np.asarray(sizes, float)))
        return lambda r, members, deltas: weights[members] / weights[members].sum() @ deltas

    return noise_aware_mean(make_mean)


def pfa_mean(sizes):
    epsilon = np.array(EPSILON)
    return lambda r, members, deltas: noise_aware.pfa_mean(
        deltas, epsilon[members], IS_PUBLIC[members]
    )


# Several models. Rounds of soft clusters, and ε of a choice: three rounds hold every kind of round.

SOFT_ROUNDS, CHOICE_EPSILON = 2, 3.0


def ifca(run: Run):
    start = theta_of(run.initial.server.models)
    found, choices = federated.ifca(start, *run.rounds, run.sgd())
    return {"models": found, "choices": choices}


def _first_batches(run: Run, largest):
    """DP-SGD of a round whose batches are this large, or all of a client's data."""
    replay = run.replay
    sizes = np.minimum(np.maximum(replay.sizes, 1), largest)
    first = Replay(replay.key, replay.participation, replay.sampler, replay.sizes, sizes, SHAPES)

    def train(start, round_index, i):
        x, y = run.clients[i]
        rate, _, epochs, clip_norm, multiplier = (column[i] for column in SETTINGS)
        steps = local.num_steps(len(y), sizes[i], epochs)
        batches, noise = (of(round_index, i, steps) for of in (first.batches, first.record_noise))
        return local.dp_sgd(start, x, y, batches, noise, rate, sizes[i], clip_norm, multiplier)

    return train


def r_dpcfl(is_exact, soft_rounds=SOFT_ROUNDS, trained=ROUNDS, first_batch=np.inf):
    def expect(run: Run):
        def choose(candidates, r, i):
            x, y = run.clients[i]
            if is_exact:
                return clustered.choose_exactly(candidates, x, y)
            noise = clustered.gumbel(run.replay, r, i, NUM_MODELS)
            return clustered.choose_privately(candidates, x, y, CHOICE_EPSILON, noise)

        def weight_of(i):
            return len(run.clients[i][1]) if is_exact else 1

        trains = run.dp_sgd(), _first_batches(run, first_batch)
        numbers = ROUNDS, NUM_MODELS, soft_rounds
        return clustered.r_dpcfl(run, *trains, *numbers, choose, weight_of, trained)

    return expect


def f_cdpfl(num_selections, trained=ROUNDS):
    def expect(run: Run):
        numbers = ROUNDS, num_selections, CHOICE_EPSILON, trained
        return clustered.f_cdpfl(run, run.dp_sgd(), *numbers)

    return expect


def o_dpcfl(run: Run):
    theta = theta_of(run.initial.server.models)[0]
    return {"models": clustered.o_dpcfl(theta, *run.rounds, run.sgd(), CLUSTERS)}


def km_cdpfl(run: Run):
    theta = theta_of(run.initial.server.models)[0]
    found, clusters = clustered.km_cdpfl(theta, *run.rounds, run.sgd(), NUM_MODELS)
    return {"models": found, "clusters": clusters}


# Models of the clients.


def averaged_models(**how):
    """Averages of models on growing data."""

    def expect(run: Run):
        theta, own = averaging.averaged_models(
            run.theta, *run.rounds, SETTINGS, GROWING_ROWS, GROWING_DECAY, **how
        )
        return {"params": theta, "own": own}

    return expect


def local_only(run: Run):
    theta = theta_of(run.initial.server.start)
    return {"rows": federated.local_only(theta, run.replay, ROUNDS, run.sgd())}


def mr_mtl(run: Run):
    theta = theta_of(run.initial.server.mean)
    own = clustered.mr_mtl(theta, *run.rounds, SETTINGS, 0.5)
    return {"rows": own, "mean": own.mean(axis=0)}


# The bias stays at home.
IS_HOME = np.array([True, False, False, False])


def at_home(head_epochs=None):
    def expect(run: Run):
        arguments = run, ROUNDS, run.personal(), IS_HOME
        theta, own = personal.at_home(run.theta, *arguments, head_epochs=head_epochs)
        return {"params": theta, "own": own[:, 0]}

    return expect


def ditto(run: Run, purpose=personal.SECOND):
    theta, own = personal.ditto(run.theta, run, ROUNDS, run.personal(), 0.6, purpose)
    return {"params": theta, "own": own}


def lottery_fl(run: Run):
    theta, masks = personal.lottery_fl(run.theta, run, ROUNDS, run.personal(), 0.4, 0.5, 0.25)
    return {"params": theta, "masks": masks[:, 1:]}


LTN = {
    "prune_rate": 0.7,
    "target": 0.7,
    "accuracy_threshold": 0.58,
    "strength": 0.05,
    "mixing": 0.6,
    "momentum": 0.4,
}


def fed_ltn(run: Run, variant=personal.Variant()):
    found = personal.fed_ltn(run.theta, run, ROUNDS, run.personal(), IS_HOME, LTN, variant=variant)
    return {"params": found["params"], "own": found["own"][:, 0], "masks": found["masks"]}


def jump_start(run: Run, variant=personal.Variant(), **options):
    stage = {"jump_rounds": 2, "jump_target": 0.4, **options}
    arguments = theta_of(run.initial.server.inner.params), run, ROUNDS, run.personal(), IS_HOME, LTN
    found = personal.fed_ltn(*arguments, variant=variant, **stage)
    return found | {"own": found["own"][:, 0]}
