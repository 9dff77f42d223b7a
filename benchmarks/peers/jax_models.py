"""The benchmarks' networks in plain JAX, for the peers that differentiate any function."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Apply = Callable[[dict[str, jax.Array], jax.Array], jax.Array]


def network(name: str) -> Apply:
    """Names the `(params, x) -> logits` of a model; `params` are the arrays of a problem."""
    return {
        "logistic_regression": lambda params, x: _dense(params, "Dense_0", x),
        "emnist_cnn": _emnist_cnn,
        "thesis_cnn": _thesis_cnn,
        "resnet18": _resnet18,
    }[name]


def mean_loss(apply: Apply) -> Callable[..., jax.Array]:
    """Builds `(params, x, y) -> loss`, the mean cross entropy of a batch."""

    def loss(params, x, y):
        log_likelihoods = jax.nn.log_softmax(apply(params, x))
        return -jnp.mean(jnp.take_along_axis(log_likelihoods, y[:, None], axis=1))

    return loss


def _conv(params, name, x, padding, stride=1):
    y = jax.lax.conv_general_dilated(
        x,
        params[f"{name}/kernel"],
        (stride, stride),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return y + params[f"{name}/bias"] if f"{name}/bias" in params else y


def _dense(params, name, x):
    return x @ params[f"{name}/kernel"] + params[f"{name}/bias"]


def _pool(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _emnist_cnn(params, x):
    x = jax.nn.relu(_conv(params, "Conv_0", x, "VALID"))
    x = _pool(jax.nn.relu(_conv(params, "Conv_1", x, "VALID")))
    x = jax.nn.relu(_dense(params, "Dense_0", x.reshape(x.shape[0], -1)))
    return _dense(params, "Dense_1", x)


def _thesis_cnn(params, x):
    x = _pool(jax.nn.relu(_conv(params, "Conv_0", x, "SAME")))
    x = _pool(jax.nn.relu(_conv(params, "Conv_1", x, "SAME")))
    return _dense(params, "Dense_0", x.reshape(x.shape[0], -1))


def _group_norm(params, name, x, num_groups=2):
    grouped = x.reshape(*x.shape[:-1], num_groups, -1)
    mean = jnp.mean(grouped, axis=(1, 2, 4), keepdims=True)
    variance = jnp.var(grouped, axis=(1, 2, 4), keepdims=True)
    normalized = ((grouped - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    return normalized * params[f"{name}/scale"] + params[f"{name}/bias"]


def _resnet18(params, x):
    pad_one = ((1, 1), (1, 1))
    x = jax.nn.relu(_group_norm(params, "stem_norm", _conv(params, "stem", x, pad_one)))
    for stage in (1, 2, 3, 4):
        for block in (1, 2):
            name = f"stage{stage}_block{block}"
            stride = 2 if stage > 1 and block == 1 else 1
            y = _conv(params, f"{name}/conv1", x, pad_one, stride)
            y = jax.nn.relu(_group_norm(params, f"{name}/norm1", y))
            y = _group_norm(params, f"{name}/norm2", _conv(params, f"{name}/conv2", y, pad_one))
            if f"{name}/shortcut/kernel" in params:
                x = _conv(params, f"{name}/shortcut", x, "VALID", stride)
                x = _group_norm(params, f"{name}/shortcut_norm", x)
            x = jax.nn.relu(x + y)
    return _dense(params, "head", jnp.mean(x, axis=(1, 2)))
