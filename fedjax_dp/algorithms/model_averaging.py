"""Averages of whole models on data that grow by round: both of PrivacyFL's methods."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_dp.algorithms.base import (
    Averaged,
    ClientOutput,
    ClientState,
    FederatedAlgorithm,
    Numbers,
    Training,
    Views,
    field,
    training_of,
)
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.clients.client_data import ClientData, Form, Growth, growing
from fedjax_dp.clients.minimizer_noise import (
    Calibration,
    Mechanism,
    MinimizerNoise,
    minimizer_noise,
)
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.ranges import Count, HalfFraction, NonNegative, Positive
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.privacy.claims import OnceClaim, RecordClaim
from fedjax_dp.server.base import Aggregator
from fedjax_dp.server.mean import CountedMean, counted_mean

Personal = Literal["own", "received", "shared"]


class OutputPerturbation(NamedTuple):
    """The noise on trained models, and the regulariser that bounds how a record changes them.

    Attributes:
      regularizer: α of `α/2 ‖w‖²` in training and in the sensitivity; 0, for none, without privacy
        or under "released".
      mechanism: the noise, see `minimizer_noise`.
      calibration: "corrected"; "paper" for the printed scale, which is divided by the number of
        clients although their average is too; or "released" for that scale with another α than that
        of training, as in the released code. The claim says what each is worth: under "released"
        without a regulariser, or with a model without a gradient_bound, that nothing is guaranteed.
      entry_delta: δ of one entry, for "bounded_laplace".
      noise_regularizer: α that the noise is made for under "released", above 0; 1 in the source.
    """

    regularizer: NonNegative = 0.1
    mechanism: Mechanism = "laplace"
    calibration: Calibration = "corrected"
    entry_delta: HalfFraction = 1e-9
    noise_regularizer: Positive | None = None


class ServerState(NamedTuple):
    """The server's state."""

    params: PyTree  # The mean of the clients' models.
    is_active: jax.Array  # The clients that have not left, `[num_clients]`, bool; see `leaving`.
    num_averaged: jax.Array  # How many models the mean is of, float32.
    round: jax.Array  # The round that it is of, int32; -1 before the first.


class OwnModel(NamedTuple):
    """A client's state."""

    sent: PyTree  # The model that it sent last, noise included; None if its noise is a share.
    trained: PyTree  # The same without noise; None if nothing reads it.
    noise: PyTree  # Its own noise in it; None if nothing reads it.
    round: jax.Array  # The round in which it was sent, int32; -1 before the first.


class Start(NamedTuple):
    """The message to a client."""

    params: PyTree  # The mean of the clients' models.
    num_active: jax.Array  # How many clients have not left, float32.
    smallest: jax.Array  # Records of the smallest of them in this round, float32.


def averaged_models(
    model: Model,
    trainer: LocalTrainer,
    start_of: Callable[[PyTree], PyTree],
    num_clients: int,
    rows_per_round: Count | Sequence[Count] | None,
    growth: Form,
    perturbation: OutputPerturbation,
    personal: Personal,
    aggregator: Aggregator | None,
    name: str,
) -> FederatedAlgorithm:
    """Declares rounds in which clients train from a start, add noise, and are averaged.

    `start_of` makes the start of training from the received model; it must depend on no record that
    the round reads, but through noised models.
    """
    is_printed = perturbation.calibration != "corrected"
    trainer.require_untransformed("the models themselves are averaged")
    data = None if rows_per_round is None else growing(rows_per_round, num_clients, growth)
    noise = None
    if trainer.is_private:
        noise = minimizer_noise(
            model,
            trainer,
            regularizer=perturbation.regularizer,
            mechanism=perturbation.mechanism,
            num_clients=num_clients,
            calibration=perturbation.calibration,
            noise_regularizer=perturbation.noise_regularizer,
            entry_delta=perturbation.entry_delta,
        )
        trainer = noise.training(trainer)
    scheme = _Averaging(
        trainer, start_of, data, noise, num_clients, perturbation.regularizer, is_printed, personal
    )
    rule = "be given for noise that all clients make for the smallest of them"
    fits = data is not None or noise is None or not scheme.is_common
    checks.require(fits, "rows_per_round", rule, None)

    def init(key):
        active = jnp.ones(num_clients, bool)
        return ServerState(model.init(key), active, jnp.float32(0), jnp.int32(-1))

    return FederatedAlgorithm(
        name=name,
        init=init,
        broadcast=scheme.broadcast,
        client=scheme.client,
        aggregator=aggregator or counted_mean(required=num_clients if scheme.is_shared else 0),
        server_step=scheme.server_step,
        training=scheme.training(),
        numbers=Numbers(num_clients=num_clients),
        views=Views(shared=field("params"), personal=scheme.personal_of if scheme.keeps else None),
        client_state=ClientState(scheme.first, iterate=scheme.averaged),
    )


class _Averaging(NamedTuple):
    """The functions of the declaration, and what they share."""

    trainer: LocalTrainer
    start_of: Callable[[PyTree], PyTree]
    data: Growth | None
    noise: MinimizerNoise | None
    num_clients: int
    regularizer: float
    is_printed: bool
    personal: Personal

    @property
    def is_shared(self) -> bool:
        """Whether noise comes in shares of all clients."""
        return self.noise is not None and self.noise.num_parties > 1

    @property
    def is_common(self) -> bool:
        """Whether noise is of a common size, as for shares of one sum and as printed."""
        return self.is_shared or self.is_printed

    @property
    def keeps(self) -> bool:
        """Whether a client's state holds its model without noise, and its noise."""
        return self.personal != "shared"

    @property
    def averaged(self) -> Averaged:
        """The models that are averaged, for wrappers."""
        return Averaged(
            sent=None if self.is_shared else lambda own: own.sent,
            sent_in=lambda own: own.round,
            mean=lambda server: server.params,
            mean_in=lambda server: server.round,
            active=lambda server: server.is_active,
            with_active=lambda server, is_active: server._replace(is_active=is_active),
            has_common_noise=self.noise is not None and self.is_common,
        )

    def broadcast(self, server: ServerState, client: Any) -> Start:
        """Sends the mean, and what sets the size of noise."""
        smallest: Any = 1.0
        if self.data is not None:
            smallest = self.data.smallest(server.is_active, client.round)
        count = jnp.sum(server.is_active, dtype=jnp.float32)
        return Start(server.params, count, jnp.float32(smallest))

    def client(self, message, own, client, hyper, key):
        """Trains a model from its start, adds noise, and keeps what is asked for."""
        event = None if self.noise is None else self.noise.event
        records: ClientData = client.read_by("training of a client's model", event)
        records = records if self.data is None else self.data.view(records)
        config = hyper.local
        if self.noise is not None:
            config = self.noise.training_numbers(config)
        decay = optax.add_decayed_weights(self.regularizer)
        start = self.start_of(message.params)
        result = self.trainer.train(start, records, config, key, gradient_transform=decay)
        sent = self.noised(result.params, start, hyper.local, records.size, message, key)
        has_data = records.size > 0
        round_index = jnp.asarray(client.round, jnp.int32)
        noise = trees.subtract(sent, result.params) if self.keeps else None
        after = self.state_of(sent, result.params, noise, round_index)
        update = trees.subtract(sent, message.params)
        if not self.is_shared:
            # A share of noise is sent without records too: that of others counts on it.
            update = trees.where(has_data, update, trees.zeros_like(update))
        metrics = result.metrics.reported_by(client)
        kept = trees.where(has_data, after, own)
        return ClientOutput(update, has_data.astype(jnp.float32), kept, metrics)

    def noised(
        self, params: PyTree, start: PyTree, config: Any, size: Any, message: Start, key: Any
    ) -> PyTree:
        """Adds a client's noise to its model, which training has made from its start."""
        if self.noise is None:
            return params
        records = message.smallest if self.is_common else size
        bound = self.noise.scale(records, trees.l2_norm(start))
        multiplier = config.noise_multiplier / (message.num_active if self.is_printed else 1)
        return self.noise.add(fold(key, Purpose.CLIENT_NOISE, 0), params, bound, multiplier)

    def state_of(self, sent: PyTree, trained: PyTree, noise: PyTree, round_index: Any) -> OwnModel:
        """Makes a client's state of what something reads."""
        return OwnModel(
            None if self.is_shared else sent,
            trained if self.keeps else None,
            noise if self.keeps else None,
            round_index,
        )

    def first(self, server: ServerState) -> OwnModel:
        """Makes a client's state before its first round."""
        params = server.params
        return self.state_of(params, params, trees.zeros_like(params), jnp.int32(-1))

    def server_step(self, server, aggregate, hyper, round, key):
        """Moves to the mean of a round, if there is one."""
        rule = "average with counts, as counted_mean() and secure.masked(counted_mean(), ...) do"
        kind = type(aggregate).__name__
        checks.require(isinstance(aggregate, CountedMean), "aggregator", rule, kind)
        # An aggregator that requires fewer clients must not release a part of the shares.
        has_mean = aggregate.num_averaged >= (self.num_clients if self.is_shared else 1)
        mean = trees.where(has_mean, aggregate.mean, trees.zeros_like(aggregate.mean))
        return server._replace(
            params=optax.apply_updates(server.params, mean),
            num_averaged=jnp.where(has_mean, aggregate.num_averaged, server.num_averaged),
            round=jnp.where(has_mean, round.index, server.round),
        ), {}

    def personal_of(self, server: ServerState, own: OwnModel, client: Any) -> PyTree:
        """Makes the model that a client uses itself."""
        if self.personal == "own":
            return own.trained
        # Noise of other rounds is in no mean that it could be taken out of.
        is_in = (own.round == server.round) & (server.round >= 0)
        factor = jnp.where(is_in, trees.reciprocal(server.num_averaged), 0.0)
        received = trees.subtract(server.params, trees.scale(own.noise, factor))
        return trees.where(server.is_active[client.index], received, own.trained)

    def training(self) -> Training:
        """Collects what training declares, with the claim of the noise on models."""
        noise = self.noise
        if noise is None:
            return training_of(self.trainer)
        uncovered = []
        if self.keeps:
            uncovered.append("each client's own model without noise, which only the client has")
        if self.is_shared:
            uncovered.append(
                "a client's model by itself, without those of all other clients, and entries that "
                "masks cut to their range or round to their words"
            )
        is_once = self.data is not None and self.data.form == "disjoint"
        record = (OnceClaim if is_once else RecordClaim)(
            (lambda size, hyper: noise.event(size, hyper.local),),
            "; ".join(uncovered) or None,
            noise.num_parties if self.is_shared else 0,
            noise.in_words(self.is_common),
        )
        return training_of(self.trainer, record=record)


@checked
def warm_start_averaging(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_clients: Count,
    rows_per_round: Count | Sequence[Count] | None = None,
    growth: Form = "disjoint",
    perturbation: OutputPerturbation = OutputPerturbation(),
    personal: Personal = "own",
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm:
    """Declares averages of models that start from the shared one, on data that are new by round.

    A client takes the steps of its trainer from the received model, adds noise to the result, and
    sends it; the server averages with equal weights.

    Guarantee: with a private trainer, that of `minimizer_noise` for one record of a client in each
    round that reads it: one round if data are disjoint, so that a client pays once, and all rounds
    from its first if they are cumulative. Of one record ε is √d times that of a coordinate for d
    parameters with Laplace noise.

    Args:
      model: the model to train; under privacy `logistic_regression` with a `gradient_bound`.
      trainer: local training; a private one takes steps on all records, and its noise multiplier is
        that of the noise on models, see `MinimizerNoise`. 1/ε of a coordinate under zero-out for
        Laplace noise, 2/ε under replace-one.
      num_clients: the population.
      rows_per_round: new records of each client a round, one number or one for each; None if every
        round reads all data. A client without as many takes no part in the round.
      growth: "disjoint" if a round reads its new records alone, "cumulative" if all so far.
      perturbation: the regulariser of models and the noise on them.
      personal: what a client uses itself: "own", its model without noise; "received", the shared
        one less its own noise over the number of clients; or "shared". Neither of the first two is
        ever sent or trained from.
      aggregator: an aggregator of `counted_mean`, such as one with masks; that itself if None.

    Returns:
      The algorithm; a client's state is the model that it sent, and that before noise.

    Raises:
      ValueError: for a number out of its range, or training whose sensitivity is unknown.

    Source: Mugunthan and others 2020 (PrivacyFL); Mugunthan 2022, chapter 5, algorithm 2.
    """
    return averaged_models(
        model=model,
        trainer=trainer,
        start_of=lambda received: received,
        num_clients=num_clients,
        rows_per_round=rows_per_round,
        growth=growth,
        perturbation=perturbation,
        personal=personal,
        aggregator=aggregator,
        name="warm_start_averaging",
    )


@checked
def retrained_averaging(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_clients: Count,
    rows_per_round: Count | Sequence[Count] | None = None,
    growth: Form = "cumulative",
    perturbation: OutputPerturbation = OutputPerturbation(),
    personal: Personal = "own",
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm:
    """Declares averages of models that are trained from zero in every round, on all data so far.

    The paper retrains if the shared model is worse than a client's own, by a comparison that it
    leaves open, and its code always. So does this: what a comparison decides shows in what is sent,
    and no event covers it.

    Guarantee: as `warm_start_averaging`. Cumulative data are read again in every round, so that a
    record pays for each.

    Args:
      model: as for `warm_start_averaging`.
      trainer: as for `warm_start_averaging`.
      num_clients: as for `warm_start_averaging`.
      rows_per_round: as for `warm_start_averaging`.
      growth: as for `warm_start_averaging`.
      perturbation: as for `warm_start_averaging`.
      personal: as for `warm_start_averaging`.
      aggregator: as for `warm_start_averaging`.

    Returns:
      The algorithm; a client's state is the model that it sent, and that before noise.

    Raises:
      ValueError: for a number out of its range, or training whose sensitivity is unknown.

    Source: Mugunthan and others 2020 (PrivacyFL); Mugunthan 2022, chapter 5, algorithm 3.
    """
    return averaged_models(
        model=model,
        trainer=trainer,
        start_of=trees.zeros_like,
        num_clients=num_clients,
        rows_per_round=rows_per_round,
        growth=growth,
        perturbation=perturbation,
        personal=personal,
        aggregator=aggregator,
        name="retrained_averaging",
    )
