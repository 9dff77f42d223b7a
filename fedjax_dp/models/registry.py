"""The models that a configuration can name."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.registry import Registry, options_of
from fedjax_dp.models.base import Model
from fedjax_dp.models.cnn import emnist_cnn, fedavg_cnn, lenet5, resnet18, resnet34, thesis_cnn
from fedjax_dp.models.dense import (
    least_squares,
    linear_regression,
    logistic_regression,
    mlp,
    ordinal_regression,
    poisson_regression,
)
from fedjax_dp.models.gpt2 import gpt2
from fedjax_dp.models.language import char_lstm, char_transformer, llama
from fedjax_dp.models.text import bag_of_tokens


def _adopted(own: Any) -> Callable[..., Model]:
    """Returns a user's factory; refuses a module class, which is only half of a model."""
    from flax import linen, nnx

    is_module = isinstance(own, type) and issubclass(own, linen.Module | nnx.Module)
    rule = (
        "name a function (example_x, num_classes, *, options…) that returns a Model, such as "
        "Model.from_flax(MyModule(…), example_x, loss=…) or Model.from_nnx"
    )
    checks.require(callable(own) and not is_module, "a model of your own", rule, own)
    return own


# A user's factory is `(example_x, num_classes, num_outputs, *, options…) -> Model` too; of the two
# numbers it is given those that it names.
FACTORIES: Registry[Callable[..., Model]] = Registry(
    {
        factory.__name__: factory
        for factory in (
            logistic_regression,
            linear_regression,
            ordinal_regression,
            poisson_regression,
            least_squares,
            mlp,
            thesis_cnn,
            fedavg_cnn,
            lenet5,
            emnist_cnn,
            resnet18,
            resnet34,
            char_lstm,
            char_transformer,
            llama,
            gpt2,
            bag_of_tokens,
        )
    },
    _adopted,
)

# Arguments that the data determine; all other parameters are options.
GIVEN = ("example_x", "num_classes", "num_outputs")


@checked
def options(name: str) -> dict[str, Any]:
    """Lists the options of a model with their defaults.

    Args:
      name: one of the model names.

    Returns:
      The default of each option by name.

    Raises:
      ValueError: if the model does not exist; the message names the nearest that does.
    """
    checks.one_of("model", name, FACTORIES)
    return options_of(FACTORIES[name], GIVEN)


@checked
def build(
    name: str, example: Mapping[str, jax.ShapeDtypeStruct], num_classes: int, **chosen: Any
) -> Model:
    """Builds a model by name.

    Args:
      name: one of the model names.
      example: shapes and types of one example without the axis of examples, as
        `data.example_structure` gives them; "x" is read, and of "y" the number of targets.
      num_classes: the number of classes or tokens; regression ignores it.
      **chosen: options of the model, as `options` lists them.

    Returns:
      The model.

    Raises:
      ValueError: if the model or an option does not exist, with the nearest that does, or if
        an option is out of its range.
    """
    known = options(name)
    for option in chosen:
        checks.require(bool(known), option, f"be left out: {name} has no options", chosen[option])
        checks.one_of(f"option of {name}", option, known)
    factory = FACTORIES[name]
    sizes = {"num_classes": num_classes, "num_outputs": _num_targets(example)}
    taken = inspect.signature(factory).parameters
    given = {name: value for name, value in sizes.items() if name in taken}
    model = factory(example["x"], **given, **chosen)
    rule = "be a Model, as Model.from_flax and Model.from_nnx return"
    checks.require(isinstance(model, Model), f"the result of {name}", rule, type(model))
    return model


def _num_targets(example: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    """Counts the targets of an example, 1 where there are none."""
    return math.prod(example["y"].shape) if "y" in example else 1
