"""The options of a part, as a typed and documented model that is read off its factory."""

import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import Field, ValidationError, create_model

from fedjax_dp.core import checks
from fedjax_dp.core.registry import is_own
from fedjax_dp.experiment.schema.constraints import (
    ConfigError,
    Section,
    annotation_of,
    as_asked,
    in_a_file,
    is_plain,
    may_be_none,
    refusal,
    require_float32,
    rule_of,
)


def options_model(
    name: str,
    factory: Callable[..., Any],
    *,
    given: Sequence[str] = (),
    kinds: Mapping[str, Any] = {},
    defaults: Mapping[str, Any] = {},
) -> type[Section]:
    """Makes the model of a factory's options, which are its parameters but for `given` ones."""
    hints = typing.get_type_hints(factory, include_extras=True) | dict(kinds)
    hints = {option: in_a_file(hint) for option, hint in hints.items()}
    about = described(factory)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(factory).parameters.values():
        option = parameter.name
        if option in given or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if option not in hints or not is_plain(hints[option]):
            raise TypeError(
                f"option {option} of {name} must be annotated with a kind that a file can hold, "
                "such as float"
            )
        if option not in about and not is_own(name):
            raise TypeError(f"option {option} of {name} must have a line in the docstring")
        default = defaults.get(option, parameter.default)
        needed = default is parameter.empty
        field = Field(... if needed else default, description=about.get(option))
        fields[option] = (hints[option], field)
    return create_model(f"options of {name}", __base__=Section, __doc__=None, **fields)


def described(factory: Callable[..., Any]) -> dict[str, str]:
    """Reads the description of each parameter off the `Args:` of a docstring."""
    text = inspect.getdoc(factory) or ""
    _, _, rest = text.partition("\nArgs:\n")
    found: dict[str, str] = {}
    last = None
    for line in rest.splitlines():
        if line and not line.startswith(" "):
            break
        start = re.match(r"  (\*{0,2}\w+): (.*)", line)
        if start:
            last = start[1]
            found[last] = start[2].strip()
        elif last is not None and line.strip():
            found[last] += f" {line.strip()}"
    return found


def read_options(
    model: type[Section],
    name: str,
    key: str,
    values: Mapping[str, Any],
    origin: Callable[[str], str],
) -> dict[str, Any]:
    """Reads a table of options.

    Args:
      model: the options of the part.
      name: the part.
      key: the table's dotted name.
      values: the table.
      origin: `(dotted key) -> text`, where a value came from.

    Returns:
      The options that were given, the word "none" as None where an option can be left out.

    Raises:
      ConfigError: naming where it came from, the option, the rule, the value and the nearest
        option that exists.
    """
    fields = model.model_fields
    for option, value in values.items():
        if option not in fields:
            hint = checks.nearest(option, fields)
            raise ConfigError(
                f"{origin(f'{key}.{option}')}: there is no option {key}.{option} of {name}, "
                f"got {value!r}; "
                + (f"did you mean {hint!r}?" if hint else f"{name} has no options")
            )
    for option, field in fields.items():
        if field.is_required() and option not in values:
            raise ConfigError(
                f"{origin(key)}: {key} must hold {option!r}, {rule_of(annotation_of(field))}, "
                f"which {name} needs, got {dict(values)!r}"
            )
    ready = {
        option: None
        if value == "none" and may_be_none(fields[option].annotation)
        else as_asked(fields[option].annotation, value)
        for option, value in values.items()
    }
    try:
        model.model_validate(ready)
    except ValidationError as error:
        option = str(error.errors()[0]["loc"][0])
        where = f"{key}.{option}"
        kind = annotation_of(fields[option])
        raise refusal(origin(where), where, kind, values[option]) from None
    for option, value in ready.items():
        require_float32(origin(f"{key}.{option}"), f"{key}.{option}", value)
    return ready


def defaults_of(model: type[Section]) -> dict[str, Any]:
    """Lists the defaults of options.

    Args:
      model: the options of a part.

    Returns:
      The default of each option that has one.
    """
    return {n: f.default for n, f in model.model_fields.items() if not f.is_required()}
