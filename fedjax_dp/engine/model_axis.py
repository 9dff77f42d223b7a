"""The model axis of a mesh: each device of a group holds a part of the frozen parameters."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_dp.core import argument_checks, checks, trees
from fedjax_dp.core.devices import MODEL_AXIS
from fedjax_dp.core.ranges import Count
from fedjax_dp.models import kinds
from fedjax_dp.models.kinds import Frozen


class ModelAxis(NamedTuple):
    """Divides frozen parameters over groups of devices, each of which trains its clients together.

    Trained parameters, examples and client states are whole on each device of a group.

    Attributes:
      size: the number of devices of a group.
      rules: the axis along which arrays are divided by the pattern of their path, in the form of
        `Model.freeze`, from 0, or from -1 for the last; the first pattern that matches counts, and
        arrays that none matches are whole on each device. Kernels that follow each other need the
        least messages if they are divided along outputs and inputs in turn, such as
        `{"params/Dense_0/kernel": 1, "params/Dense_1/kernel": 0}`.
    """

    size: Count
    rules: Mapping[str, int]

    def validate(self, num_devices: int) -> None:
        """Checks the choices that do not depend on a model.

        Args:
          num_devices: the number of devices of all groups.

        Raises:
          ValueError: naming the field, the rule and the value.
        """
        argument_checks.check_fields(self, "model_axis.")
        rule = f"divide the number of devices, {num_devices}"
        checks.require(num_devices % self.size == 0, "model_axis.size", rule, self.size)
        rule = "hold a pattern of frozen parameters and an axis, such as {'params/*/kernel': 1}"
        checks.require(len(self.rules) > 0, "model_axis.rules", rule, self.rules)

    def specs(self, frozen: Sequence[Frozen]) -> list[list[PartitionSpec]]:
        """Applies the rules.

        Args:
          frozen: the frozen parameters, part by part.

        Returns:
          The division of each array, in the order of `Frozen.constants`.

        Raises:
          ValueError: if there are no frozen parameters, a pattern matches none, or an axis of a
            matching array does not exist or is no multiple of `size`.
        """
        rule = "be None for rounds without frozen parameters, such as those below adapters"
        checks.require(any(part.constants for part in frozen), "model_axis", rule, self)
        paths = [_paths(part) for part in frozen]
        known = [path for of in paths for path in of]
        kinds.require_matches("model_axis.rules", list(self.rules), known, "frozen parameters")
        return [
            [self._spec(path, np.shape(x)) for path, x in zip(of, part.constants, strict=True)]
            for of, part in zip(paths, frozen, strict=True)
        ]

    def _spec(self, path: str, shape: tuple[int, ...]) -> PartitionSpec:
        found = (axis for pattern, axis in self.rules.items() if kinds.matches(path, pattern))
        axis = next(found, None)
        if axis is None:
            return PartitionSpec()
        rule = f"be an axis of {path}, whose shape is {shape}"
        checks.require(-len(shape) <= axis < len(shape), "an axis of model_axis.rules", rule, axis)
        rule = f"divide axis {axis} of {path}, whose shape is {shape}"
        checks.require(shape[axis] % self.size == 0, "model_axis.size", rule, self.size)
        return PartitionSpec(*[None] * (axis % len(shape)), MODEL_AXIS)

    def placed(self, frozen: Sequence[Frozen], mesh: Mesh) -> tuple[tuple[jax.Array, ...], ...]:
        """Copies to each device its part of the frozen parameters.

        Args:
          frozen: the frozen parameters, part by part.
          mesh: the devices, with this axis.

        Returns:
          The arrays, in the order of `Frozen.constants`.
        """
        pairs = zip(frozen, self.specs(frozen), strict=True)
        return tuple(
            tuple(
                jax.device_put(x, NamedSharding(mesh, spec))
                for x, spec in zip(part.constants, specs, strict=True)
            )
            for part, specs in pairs
        )

    def bytes_per_device(self, frozen: Sequence[Frozen]) -> int:
        """Counts the bytes of frozen parameters on one device.

        Args:
          frozen: the frozen parameters, part by part.

        Returns:
          The number.
        """
        pairs = zip(frozen, self.specs(frozen), strict=True)
        return sum(
            x.nbytes // (self.size if MODEL_AXIS in spec else 1)
            for part, specs in pairs
            for x, spec in zip(part.constants, specs, strict=True)
        )

    def require_separate_groups(self, compiled: jax.stages.Compiled) -> None:
        """Refuses a program in which a group of CPU devices would wait for another.

        There, a permutation of arrays among the devices of a group waits for all devices, and
        groups have their own numbers of local steps. A sum or a gathering waits for the group.

        Args:
          compiled: rounds for these groups.

        Raises:
          ValueError: if devices permute arrays.
        """
        is_permuted = "collective-permute" in (compiled.as_text() or "")
        rule = (
            "divide layers that follow each other along outputs and inputs in turn, and attention "
            "by whole heads: otherwise devices exchange parts of arrays, and on CPU devices they "
            "would deadlock"
        )
        checks.require(not is_permuted, "model_axis.rules", rule, self.rules)


def _paths(part: Frozen) -> list[str]:
    """Names the frozen parameters of a part, in the order of its constants."""
    tree: Any = jax.tree.unflatten(part.structure, range(len(part.values)))
    pairs = zip(trees.paths(tree), part.values, strict=True)
    return [path for path, value in pairs if value is not None]
