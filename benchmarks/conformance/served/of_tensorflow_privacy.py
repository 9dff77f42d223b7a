"""The queries, the optimizer and the accounting of TensorFlow Privacy, as functions of arrays."""

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf
import tensorflow_privacy
from tensorflow_privacy.privacy.analysis import compute_dp_sgd_privacy_lib

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)

LAYERS = (6, 2)


def _parts(rows):
    return tf.split(tf.constant(rows, tf.float32), LAYERS, axis=-1)


def _total(query, rows, seed):
    """The noised result of a query for each row as a record."""
    tf.random.set_seed(seed)
    state = query.initial_global_state()
    params = query.derive_sample_params(state)
    sample = query.initial_sample_state([tf.zeros(size) for size in LAYERS])
    for row in rows:
        sample = query.accumulate_record(params, sample, _parts(row))
    result, state, _ = query.get_noised_result(sample, state)
    return np.concatenate([x.numpy() for x in result]), state


def gaussian_sum(rows, seed):
    return _total(tensorflow_privacy.GaussianSumQuery(1.0, 1.0), rows, seed)[0]


def optimizer_step(records, seed):
    """A step of the optimizer, whose loss is the product of parameters and record."""
    tf.random.set_seed(seed)
    kind = tensorflow_privacy.DPKerasSGDOptimizer
    optimizer = kind(l2_norm_clip=1.0, noise_multiplier=1.0, learning_rate=1.0)
    variables = [tf.Variable(tf.zeros(size)) for size in LAYERS]
    parts = _parts(records)

    def loss():
        return sum(tf.linalg.matvec(part, v) for part, v in zip(parts, variables, strict=True))

    optimizer.minimize(loss, variables)
    return -np.concatenate([v.numpy() for v in variables])


def epsilon(rounds, dp_delta):
    examples, batch = 1000, 50
    found, _ = compute_dp_sgd_privacy_lib.compute_dp_sgd_privacy(
        examples, batch, 1.0, rounds * batch / examples, dp_delta
    )
    return found
