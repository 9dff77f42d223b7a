"""f-CDPFL: IFCA with DP-SGD at the clients, which choose their cluster on their own data."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_dp.algorithms.base import (
    ClientState,
    FederatedAlgorithm,
    Stages,
    Views,
    claim_of,
    training_of,
)
from fedjax_dp.algorithms.r_dpcfl import (
    NOT_COVERED,
    SelectionRule,
    numbers_of,
    rounds_of_training,
    trained_model,
)
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.clients.selection import (
    RANGES,
    make_choice,
    only_chosen,
    trained_and_chosen,
)
from fedjax_dp.core import trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.messages import Choices
from fedjax_dp.core.ranges import Count, Index
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.privacy.claims import RecordClaim
from fedjax_dp.server.mean import mean_per_model

_SELECT, _FROZEN, _LAST = 0, 1, 2


class ServerState(NamedTuple):
    """The models of all clusters, `[models, ...]`."""

    models: PyTree


@checked
def f_cdpfl(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_rounds: Count,
    num_models: Count,
    selection_rule: SelectionRule = SelectionRule(),
    is_weighted: bool = False,
    is_identical_start: bool = False,
    ends_with_choice: bool = False,
) -> FederatedAlgorithm:
    """Declares IFCA under record-level privacy.

    Clients choose among the server's models by their own training data, train the chosen one by
    DP-SGD, and each model moves by the mean of its clients' updates. Private choices are made in
    the first rounds only, after which each client's model is fixed; exact ones in every round.

    Guarantee: unit of privacy is one record of one client; training and private choices are
    composed jointly. With `selection="exact"` the choices are not covered, and the declaration says
    so.

    Args:
      model: the model to train.
      trainer: a private trainer.
      num_rounds: rounds of the whole run (E), at least 1.
      num_models: number of clusters (M), at least 1.
      selection_rule: how clients choose among the models.
      is_weighted: weight clients by their number of examples within a cluster.
      is_identical_start: start from one model for all clusters, so that the first choices are
        random.
      ends_with_choice: make the last round a choice alone, as for `r_dpcfl`, so that a client has
        the model that fits its data best after training, and not the one that it last trained.

    Returns:
      The algorithm; a client's state is the index of the model that it last trained or chose.

    Raises:
      ValueError: for a trainer that is not private, or numbers out of range.

    Source: Ghosh and others 2020 (IFCA), algorithm 1; f-CDPFL of Malekmohammadi and others 2024
    (RC-DPFL).
    """
    trainer.private_claim()  # Refuses a trainer that is not private.
    choice = make_choice(model, selection_rule.selection, selection_rule.score)
    num_trained = rounds_of_training(num_rounds, ends_with_choice)
    is_offered = jnp.ones(num_models, bool)

    def init(key):
        if is_identical_start:
            keys = jnp.stack([key] * num_models)
        else:
            keys = jax.random.split(key, num_models)
        return ServerState(jax.vmap(model.init)(keys))

    def stage_of(server, hyper, round_index):
        is_choosing = round_index < hyper.algorithm["num_selections"]
        stage = jnp.where(is_choosing, _SELECT, _FROZEN)
        is_last = ends_with_choice & (round_index + 1 == num_rounds)
        return jnp.where(is_last, _LAST, stage).astype(jnp.int32)

    def broadcast(server, client):
        """Sends all models if clients choose; else the one that the client chose last."""
        is_choosing = client.stage != _FROZEN
        return Choices(server.models, jnp.int32(num_models), is_choosing, client.known)

    def client(message, own, client, hyper, key):
        own_key = fold(key, Purpose.SELECTION)
        # All clients are at the same stage, so the choice is skipped under vmap too.
        chosen = jax.lax.cond(
            client.stage != _FROZEN,
            lambda: choice.of(own_key, message.offered(), client, is_offered, hyper.algorithm),
            lambda: own,
        )
        chosen = jnp.where(client.size > 0, chosen, own)
        is_last = client.stage == _LAST
        return trained_model(
            trainer, message, chosen, client, hyper.local, key, is_last, is_weighted
        )

    def server_step(server, aggregate, hyper, round, key):
        return ServerState(optax.apply_updates(server.models, aggregate)), {}

    trained = claim_of(trainer, lambda hyper: hyper.local)
    assert trained is not None
    (train_event,) = trained.events
    last = (only_chosen(choice),) if ends_with_choice else ()
    events = trained_and_chosen(train_event, choice), train_event, *last
    not_covered = NOT_COVERED if choice.event is None else None
    return FederatedAlgorithm(
        name="f_cdpfl",
        init=init,
        broadcast=broadcast,
        client=client,
        aggregator=mean_per_model(num_models, is_weighted=True),
        server_step=server_step,
        training=training_of(trainer, record=RecordClaim(events, not_covered)),
        views=Views(personal=lambda server, own, client: trees.take(server.models, own)),
        client_state=ClientState(init=lambda server: jnp.int32(0), known=lambda own: own),
        stages=Stages(stage_of=stage_of, choice=choice),
    ).with_numbers(
        numbers_of(selection_rule, num_rounds, num_trained), {**RANGES, "num_selections": Index}
    )
