"""Models as values, the losses of their examples, and a zoo of the field's networks."""

from fedjax_dp.models.base import Model
from fedjax_dp.models.cnn import emnist_cnn, fedavg_cnn, lenet5, resnet18, resnet34, thesis_cnn
from fedjax_dp.models.dense import (
    LossBounds,
    least_squares,
    linear_regression,
    logistic_regression,
    loss_bounds,
    mlp,
    ordinal_regression,
    poisson_regression,
)
from fedjax_dp.models.generation import generator
from fedjax_dp.models.gpt2 import gpt2
from fedjax_dp.models.language import char_lstm, char_transformer, llama
from fedjax_dp.models.lora import lora
from fedjax_dp.models.losses import (
    IGNORE_LABEL,
    Loss,
    half_squared_error,
    ordinal_correct,
    ordinal_cross_entropy,
    poisson_nll,
    sigmoid_binary_cross_entropy,
    sigmoid_correct,
    sigmoid_half_squared_error,
    softmax_correct,
    softmax_cross_entropy,
    squared_error,
)
from fedjax_dp.models.lowering import lower
from fedjax_dp.models.registry import build, options
from fedjax_dp.models.text import bag_of_tokens
from fedjax_dp.models.weights import Weighted, weighted

__all__ = [
    "IGNORE_LABEL",
    "Loss",
    "LossBounds",
    "Model",
    "Weighted",
    "bag_of_tokens",
    "build",
    "char_lstm",
    "char_transformer",
    "emnist_cnn",
    "fedavg_cnn",
    "generator",
    "gpt2",
    "half_squared_error",
    "least_squares",
    "lenet5",
    "linear_regression",
    "llama",
    "logistic_regression",
    "lora",
    "loss_bounds",
    "lower",
    "mlp",
    "options",
    "ordinal_correct",
    "ordinal_cross_entropy",
    "ordinal_regression",
    "poisson_nll",
    "poisson_regression",
    "resnet18",
    "resnet34",
    "sigmoid_binary_cross_entropy",
    "sigmoid_correct",
    "sigmoid_half_squared_error",
    "softmax_correct",
    "softmax_cross_entropy",
    "squared_error",
    "thesis_cnn",
    "weighted",
]
