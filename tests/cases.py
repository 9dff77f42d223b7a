"""One small case for every algorithm, on which laws, oracles and the contract run."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import expected
import jax
import jax.numpy as jnp
import numpy as np
import optax
from marks import later, telling
from oracles import federated, generalization, noise_aware, personal, private_parts
from oracles.replay import Replay
from small_problem import (
    CLUSTERS,
    COHORT,
    NUM_CLIENTS,
    NUM_MODELS,
    ONE_CLIENT,
    PUBLIC,
    ROUNDS,
    SETTINGS,
    SHAPES,
    VALIDATION_SIZES,
    Settings,
    make_data,
    make_model,
    plain_trainer,
    private_trainer,
    theta_of,
)

from fedjax_dp import algorithms
from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.core.registry import grouped
from fedjax_dp.data import participants, sampling
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine import ExecutionConfig, Simulation, simulation
from fedjax_dp.models.base import Model
from fedjax_dp.server.base import Stacked, stateless, update_alone
from fedjax_dp.server.masking import gradient_mask
from fedjax_dp.server.parts import by_parts
from fedjax_dp.server.private import gaussian_mean
from fedjax_dp.server.trimmed_mean import trimmed_mean


class Case(NamedTuple):
    """An algorithm; `observe` reads from a state what `expect` computes by hand."""

    name: str
    factory: Callable
    make: Callable[[Model], FederatedAlgorithm]
    expect: Callable[[expected.Run], dict[str, np.ndarray]]
    observe: Callable[[Any], dict[str, np.ndarray]]
    is_private: bool = False
    is_pooled: bool = False
    is_validated: bool = False

    def settings(self) -> Settings:
        return ONE_CLIENT if self.is_pooled else SETTINGS

    def data(self) -> FederatedData:
        return algorithms.pool(make_data()) if self.is_pooled else make_data()

    def validation(self) -> FederatedData | None:
        """A second split of the same clients' data, for those that ask for one."""
        return make_data(VALIDATION_SIZES, seed=1) if self.is_validated else None

    def participation(self) -> participants.Participation:
        if self.is_pooled:
            return participants.participation(sampling.full_participation(), 1)
        return participants.participation(sampling.poisson(), NUM_CLIENTS, COHORT)

    def record_sampler(self) -> sampling.Sampler:
        return sampling.poisson() if self.is_private else sampling.shuffled()

    def simulation(self, execution=ExecutionConfig(), model=None) -> Simulation:
        algorithm = self.make(model or make_model())
        return simulation(
            algorithm, self.data(), self.participation(), execution, validation=self.validation()
        )

    def run_of(self, initial, key) -> expected.Run:
        sizes, batch_sizes = self.data().sizes, self.settings().batch_size
        draws = self.participation(), self.record_sampler(), sizes, batch_sizes, SHAPES
        clients, validation = _by_client(self.data()), _by_client(self.validation())
        return expected.Run(initial, clients, Replay(key, *draws), validation)


def _by_client(data: FederatedData | None) -> list:
    if data is None:
        return []
    return [
        (data.client(i)["x"].astype(np.float64), data.client(i)["y"].astype(np.float64))
        for i in range(data.num_clients)
    ]


def case(
    name,
    expect,
    observe=expected.shared_model,
    *,
    of=None,
    trainer=plain_trainer,
    is_pooled=False,
    is_validated=False,
    **options,
) -> Case:
    """A case of the algorithm `of`, else of the one that it is named after, with its options."""
    factory = getattr(algorithms, of or name)

    def make(model):
        return factory(model, trainer(model), **grouped(factory, options))

    is_private = trainer is private_trainer
    return Case(name, factory, make, expect, observe, is_private, is_pooled, is_validated)


def median_aggregator() -> Stacked:
    """A stacked aggregator: the coordinate-wise median of the cohort, zero for an empty one."""

    def combine(state, numbers, stack, close):
        def median(a):
            mask = close.contributes.reshape(-1, *[1] * (a.ndim - 1))
            return jnp.nan_to_num(jnp.nanmedian(jnp.where(mask, a, jnp.nan), axis=0))

        return state, jax.tree.map(median, stack), {}

    def contribute(state, numbers, update, sender):
        return update

    return Stacked(stateless, contribute, combine, message=update_alone)


def _parts_of_scaffold(weigh: Any, **how: Any) -> Case:
    return case(
        "scaffold_private",
        expected.scaffold_private(weigh),
        expected.controls,
        of="scaffold",
        server_learning_rate=0.7,
        aggregator=by_parts(_MEAN, **how),
        **_BY_CLIENT,
    )


def _with_momentum(learning_rate):
    return optax.sgd(learning_rate, momentum=0.6)


_TICKET = {"home": "b", "prunable": "w", **expected.LTN}
_JUMP = {"jump_rounds": 2, "jump_target": 0.4, **_TICKET}


def _variant(name: str, observe: Callable[[Any], Any] | None = None, **options: Any) -> Case:
    """FedLTN or its first stage with other options, by hand too."""
    own = {key: options[key] for key in personal.Variant._fields if key in options}
    stage = {key: value for key, value in options.items() if key not in own}
    usual = CASES[name]
    return case(
        name,
        functools.partial(usual.expect, variant=personal.Variant(**own), **stage),
        observe or usual.observe,
        is_validated=True,
        **(_JUMP if name == "jump_start" else _TICKET) | options,
    )


_SERVER = {"server_learning_rate": 0.1, "b1": 0.8, "adaptivity": 0.1}
_BY_CLIENT = {"num_clients": NUM_CLIENTS}
_PRIVATE = {"trainer": private_trainer}
_BOTH = _BY_CLIENT | _PRIVATE
_MEAN = gaussian_mean(0.2, 0.8, COHORT)
_CENTRAL = {"aggregator": _MEAN}
_OWN_MEAN = {"private_mean": _MEAN}
# Clients of algorithms whose aggregation is their own, protected.
PRIVATE = (
    *("scaffold_private", "feddyn_private", "fedpi_private", "ifca_private", "o_dpcfl_private"),
    "mr_mtl_private",
)
_GROWING = {
    "rows_per_round": expected.GROWING_ROWS,
    "regularizer": expected.GROWING_DECAY,
    **_BY_CLIENT,
}
_MASK = {"aggregator": gradient_mask(threshold=0.6)}


def _adaptive(kind, b2):
    return lambda: federated.adaptive_server(kind, 0.1, 0.8, b2, 0.1)


_CASES = (
    case("fedavg", expected.fedavg()),
    case(
        "fedavgm",
        expected.fedavg(lambda: federated.sgd_server(0.5, 0.7)),
        server_learning_rate=0.5,
        momentum=0.7,
    ),
    case("fedadam", expected.fedavg(_adaptive("adam", 0.9)), b2=0.9, **_SERVER),
    case("fedyogi", expected.fedavg(_adaptive("yogi", 0.9)), b2=0.9, **_SERVER),
    case("fedadagrad", expected.fedavg(_adaptive("adagrad", None)), **_SERVER),
    case("fedprox", expected.fedavg(mu=0.5), mu=0.5),
    case("median", expected.median, of="fedavg", aggregator=median_aggregator()),
    case("trimmed_mean", expected.trimmed_mean, of="fedavg", aggregator=trimmed_mean(0.4)),
    case("feddyn", expected.feddyn, expected.corrections, num_clients=NUM_CLIENTS, alpha=0.4),
    case("scaffold", expected.scaffold, expected.controls, server_learning_rate=0.7, **_BY_CLIENT),
    case("gma", expected.gma(), of="fedavg", **_MASK),
    case(
        "gma_hard",
        expected.gma(kind="hard"),
        of="fedavg",
        aggregator=gradient_mask(threshold=0.6, mask="hard"),
    ),
    case(
        "gma_printed",
        expected.gma(form="printed"),
        of="fedavg",
        aggregator=gradient_mask(threshold=0.6, form="printed"),
    ),
    case("gma_fedprox", expected.gma(mu=0.5), of="fedprox", mu=0.5, **_MASK),
    case(
        "gma_fedadam", expected.gma(_adaptive("adam", 0.9)), of="fedadam", b2=0.9, **_SERVER | _MASK
    ),
    case(
        "gma_fedyogi", expected.gma(_adaptive("yogi", 0.9)), of="fedyogi", b2=0.9, **_SERVER | _MASK
    ),
    case(
        "gma_scaffold",
        expected.gma_scaffold,
        expected.controls,
        of="scaffold",
        server_learning_rate=0.7,
        aggregator=gradient_mask(threshold=0.6, is_weighted=False),
        **_BY_CLIENT,
    ),
    case(
        "gma_private",
        expected.gma_private,
        of="dp_fedavg",
        aggregator=gradient_mask(_MEAN, threshold=0.6, vote_share=0.5),
    ),
    case(
        "afl",
        expected.afl,
        lambda state: expected.shared_model(state) | {"weights": np.asarray(state.aggregator)},
        step_size=0.3,
        **_BY_CLIENT,
    ),
    case(
        "term",
        expected.term,
        lambda state: expected.shared_model(state) | {"risk": np.asarray(state.server.risk)},
        tilt=2.0,
    ),
    case("q_ffl", expected.q_ffl, q=0.5),
    case("propfair", expected.propfair(generalization.propfair_sgd), baseline=2.0, margin=1.2),
    case(
        "propfair_private",
        expected.propfair(generalization.propfair_dp_sgd),
        of="propfair",
        baseline=2.0,
        margin=1.2,
        **_PRIVATE,
    ),
    case(
        "splitting",
        expected.splitting((1.6, 0.7, 0.6), is_averaged=True),
        expected.points,
        alpha=1.6,
        beta=0.7,
        gamma=0.6,
        step_size=expected.STEP_SIZE,
        is_averaged=True,
    ),
    case(
        "fedsplit",
        expected.splitting((2, 2, 1), is_weighted=True),
        expected.points,
        step_size=expected.STEP_SIZE,
        is_weighted=True,
    ),
    *(
        case(name, expected.splitting(numbers), expected.points, step_size=expected.STEP_SIZE)
        for name, numbers in {
            "fedpi": (2, 2, 0.5),
            "fedrp": (2, 1, 1),
            "reflected_fedprox": (1, 2, 1),
        }.items()
    ),
    case(
        "reflected_fedavg", expected.splitting((1, 2, 1), phi="dp_sgd"), expected.points, **_PRIVATE
    ),
    case("ifca", expected.ifca, expected.models_and_choices, num_models=NUM_MODELS),
    case("dp_fedavg", expected.dp_fedavg(0.2, 0.8), **_CENTRAL),
    case(
        "scaffold_private",
        expected.scaffold_private(),
        expected.controls,
        of="scaffold",
        server_learning_rate=0.7,
        **_BY_CLIENT,
        **_CENTRAL,
    ),
    case(
        "feddyn_private",
        expected.feddyn_private,
        expected.corrections,
        of="feddyn",
        alpha=0.4,
        **_BY_CLIENT,
        **_OWN_MEAN,
    ),
    case(
        "fedpi_private",
        expected.splitting((2, 2, 0.5), private=expected.PRIVATE),
        expected.points,
        of="fedpi",
        step_size=expected.STEP_SIZE,
        **_OWN_MEAN,
    ),
    case(
        "ifca_private",
        expected.ifca_private,
        expected.models_and_choices,
        of="ifca",
        num_models=NUM_MODELS,
        is_weighted=False,
        private_mean=gaussian_mean(*expected.PRIVATE_CHOICE),
    ),
    case(
        "o_dpcfl_private",
        expected.o_dpcfl_private,
        expected.models,
        of="o_dpcfl",
        clusters=CLUSTERS,
        **_BY_CLIENT,
        **_OWN_MEAN,
    ),
    case(
        "mr_mtl_private",
        expected.mr_mtl_private,
        lambda state: expected.client_state(state) | {"mean": theta_of(state.server.mean)},
        of="mr_mtl",
        strength=0.5,
        **_BY_CLIENT,
        **_OWN_MEAN,
    ),
    case(
        "ae_dpfl",
        expected.ae_dpfl,
        lambda state: expected.shared_model(state) | {"labels": np.asarray(state.server.labels)},
        public_x=PUBLIC,
        num_rounds=ROUNDS,
        server_learning_rate=0.4,
        server_batch_size=2,
        server_epochs=3,
    ),
    case("blur_lus", expected.blur_lus, strength=0.5, sparsity=0.4, **_CENTRAL),
    case("dp_sgd", expected.fedavg(is_private=True), **_PRIVATE),
    case(
        "dp_both",
        expected.dp_fedavg(0.2, 0.8, is_private=True),
        of="dp_fedavg",
        **_CENTRAL,
        **_PRIVATE,
    ),
    case("record_dp_fedavg", expected.by_weight(lambda sizes: sizes), **_BOTH),
    case("minimum_epsilon", expected.by_weight(np.ones_like), is_weighted=False, **_BOTH),
    case(
        "weiavg",
        expected.by_weight(lambda sizes: np.array(expected.EPSILON)),
        declared_epsilon=expected.EPSILON,
        **_BOTH,
    ),
    case(
        "pfa",
        expected.noise_aware_mean(expected.pfa_mean),
        declared_epsilon=expected.EPSILON,
        **_BOTH,
    ),
    case(
        "robust_hdp", expected.noise_aware_mean(lambda sizes: noise_aware.FirstEstimates()), **_BOTH
    ),
    case(
        "noise_oracle",
        expected.by_weight(
            lambda sizes: 1 / np.maximum(noise_aware.oracle_levels(SETTINGS, sizes), 1e-20)
        ),
        **_BOTH,
    ),
    case("local_only", expected.local_only, expected.client_state),
    case(
        "r_dpcfl",
        expected.r_dpcfl(is_exact=False),
        expected.chances,
        num_rounds=ROUNDS,
        num_models=NUM_MODELS,
        selection_epsilon=expected.CHOICE_EPSILON,
        num_selections=1,
        soft_rounds=expected.SOFT_ROUNDS,
        **_BOTH,
    ),
    case(
        "rc_dpfl",
        expected.r_dpcfl(is_exact=True),
        expected.chances,
        num_rounds=ROUNDS,
        num_models=NUM_MODELS,
        soft_share=expected.SOFT_ROUNDS / ROUNDS,
        **_BOTH,
    ),
    case(
        "f_cdpfl",
        expected.f_cdpfl(num_selections=2),
        expected.models_and_choices,
        num_rounds=ROUNDS,
        num_models=NUM_MODELS,
        selection_epsilon=expected.CHOICE_EPSILON,
        num_selections=2,
        **_PRIVATE,
    ),
    case(
        "km_cdpfl",
        expected.km_cdpfl,
        lambda state: expected.models(state) | {"clusters": state.server.clusters},
        num_models=NUM_MODELS,
        **_BY_CLIENT,
    ),
    case("o_dpcfl", expected.o_dpcfl, expected.models, clusters=CLUSTERS, **_BY_CLIENT),
    case(
        "mr_mtl",
        expected.mr_mtl,
        lambda state: expected.client_state(state) | {"mean": theta_of(state.server.mean)},
        strength=0.5,
        **_BY_CLIENT,
    ),
    case(
        "warm_start_averaging",
        expected.averaged_models(is_new=True, is_warm=True),
        expected.trained_models,
        **_GROWING,
    ),
    case(
        "retrained_averaging",
        expected.averaged_models(is_new=False, is_warm=False),
        expected.trained_models,
        **_GROWING,
    ),
    case("fedbn", expected.at_home(), expected.own_part, home="b"),
    case("fedper", expected.at_home(), expected.own_part, head="b"),
    case("fedrep", expected.at_home(head_epochs=2), expected.own_part, head="b", head_epochs=2),
    case("ditto", expected.ditto, expected.own_model, strength=0.6),
    case(
        "lottery_fl",
        expected.lottery_fl,
        lambda state: expected.shared_model(state) | {"masks": expected.bits(state.clients["w"])},
        prune_rate=0.4,
        target=0.5,
        accuracy_threshold=0.25,
        prunable="w",
        is_validated=True,
    ),
    case("fed_ltn", expected.fed_ltn, expected.ticket_and_home, is_validated=True, **_TICKET),
    case("jump_start", expected.jump_start, expected.ticket_after_jump, is_validated=True, **_JUMP),
    case(
        "centralized",
        expected.fedavg(settings=ONE_CLIENT),
        trainer=functools.partial(plain_trainer, settings=ONE_CLIENT),
        is_pooled=True,
    ),
)
CASES = {each.name: each for each in _CASES}

# Not cases of their own: in the laws they are those whose names they have.
JUMP_BY_ALL = _variant("jump_start", score="all")
VARIANTS = {
    "rewound": _variant("fed_ltn", rewinds=True, distance="squared"),
    "pruned first": _variant("fed_ltn", prunes="before", rewinds=True),
    "braking, plain mean": _variant("fed_ltn", looks_ahead=False, is_masked_mean=False),
    "a jump, rewound": _variant("jump_start", rewinds=True),
    "a jump with own masks": _variant("jump_start", expected.ticket_alone, inherits_mask=False),
    "scaffold by gradients, with momentum": case(
        "scaffold",
        expected.scaffold_by_gradients,
        expected.controls,
        trainer=functools.partial(plain_trainer, optimizer=_with_momentum),
        server_learning_rate=0.7,
        control="gradient",
        **_BY_CLIENT,
    ),
    "scaffold, protected, in scales": _parts_of_scaffold(
        private_parts.scaled(0.3, 2.0), scales={"control": 0.3, "params": 2.0}
    ),
    "scaffold, protected, in shares": _parts_of_scaffold(
        private_parts.shared(0.6, 0.8, expected.PRIVATE[0]), shares={"control": 0.6, "params": 0.8}
    ),
    # Two of the clients have more records than that.
    "r_dpcfl, with a first batch of 8, and a choice at the end": case(
        "r_dpcfl",
        expected.r_dpcfl(is_exact=False, trained=ROUNDS - 1, first_batch=8),
        expected.chances,
        num_rounds=ROUNDS,
        num_models=NUM_MODELS,
        selection_epsilon=expected.CHOICE_EPSILON,
        soft_rounds=expected.SOFT_ROUNDS,
        num_selections=0,
        first_batch_size=8,
        ends_with_choice=True,
        **_BOTH,
    ),
    # E = 2 and E_c = 1 by the paper's count of rounds.
    "rc_dpfl, assigned at the end of rounds": case(
        "rc_dpfl",
        expected.r_dpcfl(is_exact=True, soft_rounds=2, trained=ROUNDS - 1),
        expected.chances,
        num_rounds=ROUNDS,
        num_models=NUM_MODELS,
        soft_share=0.5,
        assignment="end",
        **_BOTH,
    ),
    "f_cdpfl, with a choice at the end": case(
        "f_cdpfl",
        expected.f_cdpfl(num_selections=1, trained=ROUNDS - 1),
        expected.models_and_choices,
        num_rounds=ROUNDS,
        num_models=NUM_MODELS,
        selection_epsilon=expected.CHOICE_EPSILON,
        num_selections=1,
        ends_with_choice=True,
        **_PRIVATE,
    ),
    "ditto on the same batches": case(
        "ditto",
        functools.partial(expected.ditto, purpose=None),
        expected.own_model,
        strength=0.6,
        order="interleaved",
    ),
}

# One case of every kind of declaration: what a change of the engine breaks shows in one of them.
KINDS = (
    *("fedavg", "fedadam", "fedprox", "median", "feddyn", "scaffold", "gma_private", "dp_both"),
    *("afl", "term", "propfair", "fedpi", "ifca", "ae_dpfl", "blur_lus", "robust_hdp", "weiavg"),
    *("r_dpcfl", "km_cdpfl", "mr_mtl", "fedrep", "ditto", "jump_start", "centralized"),
)


def quick_first(names):
    """Parameters of which all but `fedavg` are left to the slow suite, as telling ones."""
    names = list(names)
    return later(names, but={"fedavg"} & set(names), mark=telling)


def kinds_first(names):
    """The same, telling for one case of every kind: each compiles a round of its own."""
    names = list(names)
    kinds = [name for name in names if name in KINDS]
    return later(names, but=kinds[:1], soon=kinds[1:])
