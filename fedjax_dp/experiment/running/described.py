"""What a run says about itself in public: its configuration, its model, how inputs are encoded."""

import inspect
import tomllib
from collections.abc import Mapping
from typing import Any

import tomli_w

from fedjax_dp.core.files import entry_of
from fedjax_dp.core.registry import is_own
from fedjax_dp.experiment.assembly.build import model_options
from fedjax_dp.experiment.components.experiment import Experiment
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.models import registry as models
from fedjax_dp.models.weights import declared

# Raised when a key changes its meaning or is removed.
_VERSION = 1


def about_model(experiment: Experiment) -> dict[str, Any]:
    """Describes a model for use elsewhere: model, classes, encoding of inputs.

    Of a run that claims privacy it has public facts alone; `left_out` names what was computed from
    the data.
    """
    config, population = experiment.config, experiment.population
    tables = public_tables(tomllib.loads(config_files.to_toml(config)))
    chosen = model_options(config.model, population)
    if not is_own(config.model.name):
        defaults = models.options(config.model.name).items()
        chosen = {k: x for k, x in defaults if x is not inspect.Parameter.empty} | chosen
    loss = declared(experiment.model.loss_fn)
    about: dict[str, Any] = {
        "version": _VERSION,
        "model": {"name": tables["model"]["name"], "options": _without_places(chosen)},
        "targets": None if loss is None else loss.targets,
        "data": tables["data"]["name"],
        "input_norm": config.data.input_norm,
    }
    encoding, is_private = population.encoding, bool(config.privacy.units)
    left_out = population.exact_statistics if is_private else ()
    if encoding is not None:
        about |= (encoding.without_exact() if is_private else encoding)._asdict()
    if not left_out:
        about |= {"classes": population.class_names, "features": population.feature_names}
    return about | {"left_out": left_out}


def public_config(experiment: Experiment) -> str:
    """Returns the configuration as TOML, without client names or folders of files."""
    # Not `written`, which names clients.
    return tomli_w.dumps(public_tables(tomllib.loads(config_files.to_toml(experiment.config))))


def public_tables(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration without folders of files, and the names of clients held out."""
    public: dict[str, Any] = _without_places(tables)
    data = public.get("data", {})
    data.pop("data_dir", None)
    if data.get("unseen_clients"):
        del data["unseen_clients"]
    # Patterns of parameter paths stay.
    patterns = [("model", "frozen"), ("model", "adapters"), ("execution", "model_rules")]
    for part, name in patterns:
        if (kept := entry_of(tables, part, name)) is not None:
            public[part][name] = kept
    return public


def _without_places(value: Any) -> Any:
    """Shortens every string that looks like a path to its last part."""
    if isinstance(value, Mapping):
        return {_without_places(key): _without_places(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_places(each) for each in value]
    if isinstance(value, str):
        scheme, is_address, rest = value.partition("://")
        if is_address:
            # Servers may be named with a password, also after a question mark.
            value = rest.partition("/")[2].partition("?")[0] or scheme
        parts = [part for part in value.replace("\\", "/").split("/") if part]
        return parts[-1] if parts and parts[-1] != value else value
    return value
