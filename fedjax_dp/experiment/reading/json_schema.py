"""The JSON schema of configuration files, by which editors complete keys and mark mistakes."""

from typing import Any

from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from fedjax_dp.experiment.components.catalogue import CHOICES
from fedjax_dp.experiment.schema.config import ROOT, Config
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
    """Makes the schema of all sections, values and their ranges; options are open tables."""
    schema = Config.model_json_schema(schema_generator=_OfFiles)
    _of_fields(ROOT, schema["$defs"] | {"Config": schema})
    for key, choice in CHOICES.items():
        section, _, name = key.partition(".")
        owner = default_section(Config.model_fields[section]).__name__
        value = schema["$defs"][owner]["properties"][name]
        others = [each for each in value.pop("anyOf", []) if each != {"type": "string"}]
        value.pop("type", None)
        value["anyOf"] = [{"enum": sorted(choice.names)}, _OWN, *others]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


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
