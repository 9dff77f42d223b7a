"""FedDyn: local objectives are corrected so that their minima agree with the global one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_dp.algorithms.base import (
    ClientOutput,
    ClientState,
    FederatedAlgorithm,
    Numbers,
    Views,
    field,
    training_of,
)
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.clients.regularizers import proximal, shift
from fedjax_dp.core import ranges, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.messages import Known
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.server.base import Summed
from fedjax_dp.server.mean import per_part, scaled_sum, uniform_mean
from fedjax_dp.server.parts import public_divisor


class ServerState(NamedTuple):
    """The model, and the clients' total drift from it.

    Attributes:
      params: the model's parameters, w.
      correction: h, minus α times the sum of all deltas so far over the number of clients.
    """

    params: PyTree
    correction: PyTree


@checked
def feddyn(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_clients: ranges.Count,
    alpha: ranges.Positive = 0.1,
    private_mean: Summed | None = None,
) -> FederatedAlgorithm:
    """Declares FedDyn, federated learning with dynamic regularisation.

    A client minimises `L_i(w) − ⟨g_i, w⟩ + α / 2 · ‖w − w_server‖²`, and
    stores `g_i ← g_i − α (w_i − w_server)`, which is its gradient at its own minimum. The server
    moves to the mean of the participants' models, minus `h / α`.

    Guarantee: for records that of the trainer. For clients that of the private mean, which clips
    and noises deltas; the share of clients in a round, by which h moves, is then the public one
    that the mean divides by. A client's correction of gradients follows its delta before it is
    clipped; it never leaves the client and is not covered.

    Args:
      model: the model to train; buffers, such as the statistics of batch norm, are only averaged.
      trainer: local training; with a private one all corrections come from noised gradients.
      num_clients: the population, over which the server's correction is a mean.
      alpha: α, the strength of the dynamic regulariser, above 0.
      private_mean: combines deltas if clients are protected, such as `gaussian_mean`.

    Returns:
      The algorithm; a client's state is its correction of gradients.

    Raises:
      ValueError: for a number out of its range, or a private mean without a public divisor.

    Source: Acar and others 2021 (FedDyn), algorithm 1.
    """

    def correction_of(params):
        # Corrections are sums over many rounds, so they are float32 for any model.
        return jax.tree.map(lambda p: trees.zeros_like(trees.at_least_float32(p)), params)

    def moved(correction, delta, alpha):
        """Subtracts α · delta from a correction; buffers, which have no gradient, have none."""

        def of_leaf(c, d, is_buffer):
            return c if is_buffer else c - alpha * d

        return jax.tree.map(of_leaf, correction, delta, model.is_buffer(delta))

    def init(key):
        params = model.init(key)
        return ServerState(params, correction_of(params))

    def client(message, own, client, hyper, key):
        alpha = hyper.algorithm["alpha"]
        corrected = optax.chain(proximal(alpha), shift(trees.scale(own, -1.0)))
        result = trainer.train(message, client, hyper.local, key, gradient_transform=corrected)
        update = result.delta
        if divisor is None:
            update = {"params": update, "share": Known(jnp.float32(1))}
        own = moved(own, result.delta, alpha)
        return ClientOutput(update, result.weight, own, result.metrics)

    def server_step(server, aggregate, hyper, round, key):
        alpha = hyper.algorithm["alpha"]
        if divisor is None:
            mean, share = aggregate["params"], aggregate["share"]
        else:
            mean, share = aggregate, divisor(hyper.aggregator) / num_clients
        correction = moved(server.correction, mean, alpha * share)
        step = jax.tree.map(lambda d, h: d - h * trees.reciprocal(alpha), mean, correction)
        # An empty round has no mean, and leaves the model unchanged.
        step = trees.where(share > 0, step, trees.zeros_like(step))
        return ServerState(optax.apply_updates(server.params, step), correction), {}

    divisor = private_mean and public_divisor(private_mean)
    parts = {"params": uniform_mean(), "share": scaled_sum(num_clients)}
    return FederatedAlgorithm(
        name="feddyn",
        init=init,
        broadcast=lambda server, client: server.params,
        client=client,
        aggregator=private_mean or per_part(parts),
        server_step=server_step,
        training=training_of(trainer),
        numbers=Numbers(num_clients=num_clients),
        views=Views(shared=field("params")),
        client_state=ClientState(init=lambda server: correction_of(server.params)),
    ).with_numbers({"alpha": alpha}, {"alpha": ranges.Positive})
