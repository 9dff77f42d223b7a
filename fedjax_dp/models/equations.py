"""Equations of a traced function, evaluated one by one."""

from typing import Any

from jax.extend.core import JaxprEqn


def evaluate(eqn: JaxprEqn, *operands: Any) -> list[Any]:
    """Evaluates an equation as it stands.

    Args:
      eqn: an equation of a jaxpr.
      *operands: a value for each of its inputs.

    Returns:
      A value for each of its outputs.
    """
    bound = eqn.primitive.get_bind_params(eqn.params)
    # Before jax 0.9 the functions of a call came apart from the other parameters.
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    outputs = eqn.primitive.bind(*functions, *operands, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]
