"""The JSON schema of configuration files, by which editors complete keys and mark mistakes."""

from typing import Any

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from fedjax_dp.experiment.components.catalogue import CHOICES, TABLES, Choice
from fedjax_dp.experiment.schema.config import ROOT, Config
from fedjax_dp.experiment.schema.constraints import annotation_of
from fedjax_dp.experiment.schema.sections import (
    Section,
    can_be_left_out,
    default_section,
    sections_of,
)

_NONE = {"const": "none"}
# A part of the user's own.
_OWN = {"type": "string", "pattern": ":"}


class _OfFiles(GenerateJsonSchema):
    """Writes what a file has in place of null: the word "none"."""

    def null_schema(self, schema: Any) -> dict[str, Any]:
        """Returns the schema of a value that is left out."""
        return dict(_NONE)

    def nullable_schema(self, schema: Any) -> dict[str, Any]:
        """Returns the schema of a value that may be left out."""
        return {"anyOf": [self.generate_inner(schema["schema"]), dict(_NONE)]}


def json_schema() -> dict[str, Any]:
    """Makes the schema of all sections, values and their ranges, and of the options of parts."""
    schema = Config.model_json_schema(schema_generator=_OfFiles)
    _of_fields(ROOT, schema["$defs"] | {"Config": schema})
    for key, choice in CHOICES.items():
        section, _, name = key.partition(".")
        field = default_section(Config.model_fields[section]).model_fields[name]
        owner = schema["$defs"][default_section(Config.model_fields[section]).__name__]
        value = owner["properties"][name]
        others = [each for each in value.pop("anyOf", []) if each != {"type": "string"}]
        value.pop("type", None)
        value["anyOf"] = [{"enum": sorted(choice.names)}, _OWN, *others]
        options = choice.options.partition(".")[2]
        for part in choice.names:
            schema["$defs"][f"{key}={part}"] = _of_part(choice, part)
            # Without a name, the options are those of the default part.
            chosen: dict[str, Any] = {"properties": {name: {"const": part}}}
            if part != field.default:
                chosen["required"] = [name]
            then = {"properties": {options: {"$ref": f"#/$defs/{key}={part}"}}}
            owner.setdefault("allOf", []).append({"if": chosen, "then": then})
        # Editors that read no conditions complete the options of all parts.
        parts = [{"$ref": f"#/$defs/{key}={part}"} for part in choice.names]
        owner["properties"][options]["anyOf"] = [*parts, {"type": "object"}]
    for key, choice in TABLES.items():
        section, _, name = key.partition(".")
        value = schema["$defs"][default_section(Config.model_fields[section]).__name__]
        value["properties"][name] |= {
            "properties": {part: _of_part(choice, part) for part in choice.names},
            "patternProperties": {_OWN["pattern"]: {"type": "object"}},
            "additionalProperties": False,
        }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _of_part(choice: Choice, part: str) -> dict[str, Any]:
    """Makes the schema of the options of a part."""
    fields, properties = choice.fields(part), dict[str, Any]()
    for name, field in fields.items():
        kind = TypeAdapter(annotation_of(field)).json_schema(schema_generator=_OfFiles)
        about = {"description": field.description} if field.description else {}
        is_shown = isinstance(field.default, bool | int | float | str)
        properties[name] = kind | about | ({"default": field.default} if is_shown else {})
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name, field in fields.items() if field.is_required()],
        "additionalProperties": False,
    }


def _of_fields(field: FieldInfo, parts: dict[str, Any]) -> None:
    """Completes the sections below a field: which may be "none", and which need their word."""
    for section in sections_of(field):
        for name, inner in section.model_fields.items():
            if not sections_of(inner):
                continue
            value = parts[section.__name__]["properties"][name]
            kinds = [_reference(kind) for kind in sections_of(inner)]
            for kind in sections_of(inner):
                if inner.discriminator is not None and kind is not default_section(inner):
                    # Without the word, a table is of the default kind.
                    parts[kind.__name__]["required"] = [str(inner.discriminator)]
            about = {k: v for k, v in value.items() if k == "description"}
            value.clear()
            value |= about | {"anyOf": kinds + ([dict(_NONE)] if can_be_left_out(inner) else [])}
            _of_fields(inner, parts)


def _reference(section: type[Section]) -> dict[str, str]:
    return {"$ref": f"#/$defs/{section.__name__}"}
