"""Flower's differential privacy and SecAgg+, as functions of arrays.

No simulation runs: a grid of nodes that are always there hands the strategies' own messages to the
client modifiers, and their replies back.
"""

import os

# Read on import: nothing is sent anywhere.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

import copy
import importlib
import logging
import random
from types import SimpleNamespace

import flwr.server.workflow.secure_aggregation.secaggplus_workflow as server_masks
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.app import MetricRecord as Metrics
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.common import FitIns, ndarrays_to_parameters
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.server.compat.legacy_context import LegacyContext
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from flwr.supercore.primitives.asymmetric import generate_key_pairs
from flwr.supercore.privacy_accounting import GaussianPrivacyEvent as Event
from flwr.supercore.privacy_accounting import (
    NeighboringRelation,
    PrivacyConfig,
    SamplingMethod,
)
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant
from flwr.supercore.task_identity import TaskIdentity

# Its package has a function of this name.
client_masks = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
QUANTIZE, DEQUANTIZE = client_masks.quantize, server_masks.dequantize
logging.getLogger("flwr").setLevel(logging.CRITICAL)
# Messages carry the run and the node of their process.
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1

LAYERS = (6, 2)
CLIENTS = 4
# The default, a twentieth of the clients, is refused for so few of them.
COUNT_STDDEV = 1.0
MODULUS = 2**32


class Nodes:
    """Nodes that are always there."""

    def __init__(self, count):
        self._count = count

    def get_node_ids(self):
        return list(range(1, self._count + 1))


def _record(flat):
    parts = np.split(np.asarray(flat, np.float32), np.cumsum(LAYERS)[:-1])
    return ArrayRecord({f"layer{i}": Array(part.copy()) for i, part in enumerate(parts)})


def _round(strategy, modifier, rows, weights, number=1):
    """One round, from a model of zeros; its release is the new model."""
    nodes = Nodes(max(len(rows), strategy.num_sampled_clients))
    zeros = _record(np.zeros(sum(LAYERS)))
    sent = list(strategy.configure_train(number, zeros, ConfigRecord(), nodes))
    replies = []
    for message, row, weight in zip(sent, rows, weights, strict=False):
        content = {"arrays": _record(row), "metrics": Metrics({"num-examples": float(weight)})}

        def train(received, context, content=content):
            return Message(RecordDict(content), reply_to=received)

        replies.append(modifier(message, None, train) if modifier else train(message, None))
    arrays, _ = strategy.aggregate_train(number, replies)
    if arrays is None:
        raise RuntimeError("nothing is released")
    return np.concatenate([x.ravel() for x in arrays.to_numpy_ndarrays()])


def _nonzero(rows):
    """Replaces updates of zeros, which raise, by ones that are almost zero."""
    rows = np.array(rows)
    rows[~rows.any(axis=-1), 0] = 1e-12
    return rows


def _accountant(method=SamplingMethod.NO_AMPLIFICATION, relation="ADD_OR_REMOVE_ONE", clients=None):
    relation = NeighboringRelation[relation]
    return RdpAccountant(PrivacyConfig(1e-5, clients or CLIENTS, relation, method))


def _fixed(kind, modifier, rows, weights, seed, accountant=None):
    np.random.seed(seed)  # noqa: NPY002 (of the strategies)
    random.seed(seed)
    strategy = kind(FedAvg(), 1.0, 1.0, CLIENTS, accountant=accountant)
    return _round(strategy, modifier, rows, weights)


SERVER, CLIENT = (
    DifferentialPrivacyServerSideFixedClipping,
    DifferentialPrivacyClientSideFixedClipping,
)


def fixed_server(rows, weights, seed):
    return _fixed(SERVER, None, rows, weights, seed)


def fixed_server_nonzero(rows, weights, seed):
    return _fixed(SERVER, None, _nonzero(rows), weights, seed)


def fixed_client_nonzero(rows, weights, seed):
    return _fixed(CLIENT, fixedclipping_mod, _nonzero(rows), weights, seed)


def fixed_server_accounted(rows, seed):
    rows = _nonzero(rows)
    return _fixed(SERVER, None, rows, np.ones(len(rows)), seed, _accountant())


def _adaptive(kind, modifier, rounds, seed):
    np.random.seed(seed)  # noqa: NPY002 (of the strategies)
    random.seed(seed)
    strategy = kind(FedAvg(), 1.0, CLIENTS, 1.0, clipped_count_stddev=COUNT_STDDEV)
    aggregates, norms = [], []
    for i, rows in enumerate(rounds):
        norms.append(strategy.clipping_norm)
        rows = _nonzero(rows)
        aggregates.append(_round(strategy, modifier, rows, np.ones(len(rows)), i + 1))
    return np.stack(aggregates), np.array(norms)


def adaptive_server(rounds, seed):
    return _adaptive(DifferentialPrivacyServerSideAdaptiveClipping, None, rounds, seed)


def adaptive_client(rounds, seed):
    kind = DifferentialPrivacyClientSideAdaptiveClipping
    return _adaptive(kind, adaptiveclipping_mod, rounds, seed)


def adaptive_stddev():
    """The noise multiplier that adaptive clipping computes for the model."""
    kind = DifferentialPrivacyServerSideAdaptiveClipping
    return kind(FedAvg(), 1.0, CLIENTS, clipped_count_stddev=COUNT_STDDEV).noise_multiplier


def _epsilon(strategy, rounds, dp_delta):
    """What a strategy states after rounds."""
    for i in range(rounds):
        rows = np.ones((CLIENTS, sum(LAYERS)))
        _round(strategy, None, rows, np.ones(CLIENTS), i + 1)
    return strategy.accountant.get_epsilon(dp_delta)


def epsilon_accounted(rounds, dp_delta):
    accountant = _accountant()
    return _epsilon(SERVER(FedAvg(), 1.0, 1.0, CLIENTS, accountant=accountant), rounds, dp_delta)


def epsilon_unaccounted(rounds, dp_delta):
    return SERVER(FedAvg(), 1.0, 1.0, CLIENTS).privacy_spent().epsilon


def epsilon_adaptive(rounds, dp_delta):
    kind = DifferentialPrivacyServerSideAdaptiveClipping
    strategy = kind(FedAvg(), 1.0, CLIENTS, clipped_count_stddev=COUNT_STDDEV)
    return strategy.privacy_spent().epsilon


def epsilon_poisson(rounds, dp_delta):
    accountant = _accountant(SamplingMethod.POISSON, clients=1000)
    accountant.compose(Event(1.0, 50, 1000), rounds)
    return accountant.get_epsilon(dp_delta)


def epsilon_fixed_size(rounds, dp_delta):
    accountant = _accountant(SamplingMethod.WITHOUT_REPLACEMENT, "REPLACE_ONE", 1000)
    accountant.compose(Event(1.0, 50, 1000), rounds)
    return accountant.get_epsilon(dp_delta)


def cohorts(rounds, seed):
    """Nodes that FedAvg draws from 64, an eighth of them in a round."""
    random.seed(seed)
    strategy = FedAvg(fraction_train=0.125)
    zeros = _record(np.zeros(sum(LAYERS)))
    return [
        np.array(
            [
                message.metadata.dst_node_id - 1
                for message in strategy.configure_train(i + 1, zeros, ConfigRecord(), Nodes(64))
            ]
        )
        for i in range(rounds)
    ]


class Federation:
    """Clients under SecAgg+, which the server's workflow reaches as its grid."""

    def __init__(self, values, is_dropped):
        self.values, self.is_dropped = values, is_dropped
        self.contexts = [Context(1, i + 1, {}, RecordDict(), {}) for i in range(len(values))]
        self.messages = np.zeros(values.shape, np.int64)

    def send_and_receive(self, messages, *, timeout=None):
        # As on a wire: the modifier takes entries out of what it receives.
        return [self._reply(copy.deepcopy(message)) for message in messages]

    def _reply(self, message):
        place = message.metadata.dst_node_id - 1
        stage = message.content.config_records[client_masks.RECORD_KEY_CONFIGS][
            client_masks.Key.STAGE
        ]
        is_collected = stage == client_masks.Stage.COLLECT_MASKED_VECTORS
        if is_collected and self.is_dropped[place]:
            return Message(Error(code=0, reason="dropped out"), reply_to=message)

        def train(received, context):
            content = RecordDict(
                {
                    "fitres.parameters": ArrayRecord([self.values[place]]),
                    "fitres.num_examples": Metrics({"num_examples": 1000}),
                    "fitres.metrics": ConfigRecord(),
                    "fitres.status": ConfigRecord({"code": 0, "message": ""}),
                }
            )
            return Message(content, reply_to=received)

        reply = client_masks.secaggplus_mod(message, self.contexts[place], train)
        if is_collected:
            sent = reply.content.config_records[client_masks.RECORD_KEY_CONFIGS]
            self.messages[place] = server_masks.bytes_to_ndarray(
                sent[client_masks.Key.MASKED_PARAMETERS][1]
            )
        return reply


class Cohort:
    """A strategy that selects everybody and leaves the sum to the workflow."""

    def __init__(self, count):
        self._nodes = [SimpleNamespace(node_id=i + 1) for i in range(count)]

    def configure_fit(self, server_round, parameters, client_manager):
        return [(node, FitIns(parameters, {})) for node in self._nodes]

    def aggregate_fit(self, server_round, results, failures):
        return None, {}


def _secagg_plus(values, is_dropped, quantize, dequantize):
    """The whole protocol between two functions; returns what clients sent."""
    client_masks.quantize, server_masks.dequantize = quantize, dequantize
    federation = Federation(values, is_dropped)
    context = LegacyContext(
        Context(1, 0, {}, RecordDict(), {}),
        strategy=Cohort(len(values)),
        client_manager=SimpleNamespace(num_available=lambda: len(values)),
    )
    state = context.state
    round_key = server_masks.WorkflowKey.CURRENT_ROUND
    state.config_records[server_masks.MAIN_CONFIGS_RECORD] = ConfigRecord({round_key: 1})
    model = ndarrays_to_parameters([np.zeros(values.shape[1])])
    state.array_records[server_masks.MAIN_PARAMS_RECORD] = (
        server_masks.compat.parameters_to_arrayrecord(model, True)
    )
    server_masks.SecAggPlusWorkflow(1.0, 0.5)(federation, context)
    return federation.messages


def secagg_plus(values, is_dropped, seed):
    """The protocol with integers in place of floats that it would make integers of."""
    random.seed(seed)
    sums = []

    def dequantize(arrays, clipping_range, target_range):
        sums.append(arrays[0])
        return [array.astype(float) for array in arrays]

    def quantize(arrays, clipping_range, target_range):
        return [array.astype(np.int64) for array in arrays]

    messages = _secagg_plus(values, is_dropped, quantize, dequantize)
    if not sums:
        raise RuntimeError("the workflow halted")
    return messages, sums[0]


def secagg_plus_mean(rows, seed):
    """The mean of floats, of clients that all have the largest weight."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (of the rounding)
    means = []

    def dequantize(*arguments):
        # The workflow makes means of these arrays, in place.
        means.extend(DEQUANTIZE(*arguments))
        return means

    _secagg_plus(rows, np.zeros(len(rows), bool), QUANTIZE, dequantize)
    if not means:
        raise RuntimeError("the workflow halted")
    return means[0]


def pairwise_masks(count, seed):
    """Masks of pairs of clients with new keys, each pair once."""
    clients = int(np.ceil((1 + np.sqrt(1 + 8 * count)) / 2))
    keys = [generate_key_pairs() for _ in range(clients)]
    masks = []
    for i in range(clients):
        for j in range(i):
            if len(masks) < count:
                seed_of_pair = generate_shared_key(keys[i][0], keys[j][1])
                masks.append(pseudo_rand_gen(seed_of_pair, MODULUS, [(8,)])[0])
    return np.stack(masks)


def masks_of_clients(count, seed):
    """Masks that clients draw for themselves."""
    return np.stack([pseudo_rand_gen(os.urandom(32), MODULUS, [(8,)])[0] for _ in range(count)])
