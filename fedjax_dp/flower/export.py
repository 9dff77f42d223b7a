"""Writes the Flower app of an experiment: sources, a connection, files of containers."""

import importlib.metadata
import pathlib
import re
import warnings
from typing import get_args

import tomli_w

from fedjax_dp.core import checks
from fedjax_dp.core.packages import PACKAGE
from fedjax_dp.data import datasets
from fedjax_dp.engine.federation import Federation
from fedjax_dp.experiment.assembly.assemble import checked_config, federation_of, population_of
from fedjax_dp.experiment.assembly.own_data import FILE_OPTIONS
from fedjax_dp.experiment.components.experiment import Population
from fedjax_dp.experiment.reading import config_files
from fedjax_dp.experiment.schema.config import Config
from fedjax_dp.flower.server import require_deployable
from fedjax_dp.flower.terms import Keys

_SERVER = '''"""The server app of this experiment."""

import pathlib

from fedjax_dp.flower import server_app_of

app = server_app_of(pathlib.Path(__file__).parent / "experiment.toml")
'''
_CLIENT = '''"""The client app of this experiment; a node is configured with its clients."""

import pathlib

from fedjax_dp.flower import client_app_of

app = client_app_of(pathlib.Path(__file__).parent / "experiment.toml")
'''
_DOCKERFILE = """# An image of a server or a node with fedjax-dp. Its wheel goes into wheels/, and
# those of packages that the experiment names, such as data and models of your own.
#   docker build --build-arg BASE=superlink --tag {name}-server .
#   docker build --build-arg BASE=supernode --tag {name}-node .
ARG BASE=supernode
FROM flwr/${{BASE}}:{flower}
COPY --chown=app:app wheels/ wheels/
RUN python -m pip install --no-cache-dir wheels/*.whl "fedjax-dp[{extras}]"
"""
_COMPOSE = """# A server and three nodes on one machine, for a trial. On several machines each
# runs one service, with TLS and registered nodes.
services:
  server:
    build: {{context: ., args: {{BASE: superlink}}}}
    command: --insecure --host 0.0.0.0 --port 8000 --disable-runtime-dependency-installation
    environment: &environment
      FLWR_TELEMETRY_ENABLED: "0"
      FLWR_DISABLE_UPDATE_CHECK: "1"
      JAX_COMPILATION_CACHE_DIR: /tmp/programs
    ports: ["127.0.0.1:8000:8000"]
    volumes: ["runs:{output}"]
{nodes}volumes:
  runs:
"""
_NODE = """  node-{i}:
    build: {{context: ., args: {{BASE: supernode}}}}
    command: >-
      --insecure --superlink server:8000
      --node-config 'partition-id={i} num-partitions={num} state-dir="/data/states"'
    environment: *environment
    # Data of your own, and the states of the node's clients.
    volumes: ["./data-{i}:/data"]
    depends_on: [server]
"""
_NUM_NODES = 3
# Of the package, for any machine: `table` reads the files of nodes.
_EXTRAS = "cli,flower,table,plots"
# Flower leaves this folder out of what it sends to nodes.
_CONNECTION = """# Where `flwr` finds the server of a trial on this machine, without TLS; read if
# the environment variable FLWR_HOME names this folder.
[superlink]
default = "trial"

[superlink.trial]
address = "127.0.0.1:8000"
insecure = true
"""


def write_app(
    config: Config, folder: str | pathlib.Path, output: str | pathlib.Path, *, keys: Keys = "device"
) -> list[str]:
    """Writes the app of an experiment, which `flwr run` starts.

    Args:
      config: the experiment.
      folder: a folder that is new or empty.
      output: the run folder on the server's machine, an absolute path outside of `folder`.
      keys: "device" or "parity", as for `Node`.

    Returns:
      The names of the files.

    Raises:
      ValueError: if the folder holds files, the output is not absolute or inside it, nodes would
        know the root of the server's noise, parts of the configuration do not fit together, or
        nodes cannot run it, as `deployed` says, or the server would leave out an evaluation; the
        last two where the data can be read here.
    """
    checks.one_of("keys", keys, get_args(Keys))
    require_server(config, keys)
    checked_config(config)
    place, runs = pathlib.Path(folder), pathlib.PurePosixPath(output)
    is_free = not place.exists() or (place.is_dir() and not any(place.iterdir()))
    checks.require(is_free, "the folder of the app", "be new or empty", str(place))
    checks.require(runs.is_absolute(), "output", "be an absolute path", str(output))
    rule = "be outside the folder of the app, which `flwr run` sends to all nodes"
    is_inside = pathlib.Path(runs).resolve().is_relative_to(place.resolve())
    checks.require(not is_inside, "output", rule, str(output))
    _require_deployable(config, keys)
    name = re.sub(r"[^a-z0-9]+", "-", config.title.lower()).strip("-") or "experiment"
    package = name.replace("-", "_")
    if not package[0].isalpha():
        package = f"app_{package}"
    flower = importlib.metadata.version("flwr")
    nodes = "".join(_NODE.format(i=i, num=_NUM_NODES) for i in range(_NUM_NODES))
    contents = {
        "pyproject.toml": tomli_w.dumps(_project(name, package, str(runs), flower, keys)),
        f"{package}/__init__.py": f'"""The Flower app of {name}."""\n',
        f"{package}/server.py": _SERVER,
        f"{package}/client.py": _CLIENT,
        f"{package}/experiment.toml": config_files.to_toml(config),
        ".flwr/config.toml": _CONNECTION,
        "Dockerfile": _DOCKERFILE.format(name=name, flower=flower, extras=_EXTRAS),
        "compose.yaml": _COMPOSE.format(nodes=nodes, output=runs),
    }
    for path, text in contents.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text, encoding="utf-8")
    return list(contents)


def _require_deployable(config: Config, keys: Keys) -> None:
    """Refuses what a server would refuse at its start, where the data can be read here."""
    try:
        population = population_of(config)
    except (datasets.MissingDataError, ValueError) as error:
        is_missing = isinstance(error, datasets.MissingDataError)
        # Such data may lie on the nodes alone.
        if not is_missing and FILE_OPTIONS[0] not in datasets.options(config.data.name):
            raise
        text = "the data cannot be read here; only the server will check whether nodes can run it"
        warnings.warn(f"{text}: {error}", stacklevel=3)
        return
    federation = federation_of(config, population)
    require_deployable(federation, keys)
    require_evaluated(config, federation, population)


def require_evaluated(config: Config, federation: Federation, population: Population) -> None:
    """Refuses evaluations that a server without the clients' models would leave out."""
    name, has_own = config.algorithm.name, federation.personal is not None
    rule = (
        f"be left out in a deployment of {name}: the server evaluates a shared model alone, and "
        "not that of each client"
    )
    for key, usual in (("personal", "received"), ("training", False), ("clusters", False)):
        value = getattr(config.evaluation, key)
        checks.require(not has_own or value == usual, f"evaluation.{key}", rule, value)
    tests = [population.test, population.unseen]
    tests += [] if has_own else [population.client_test]
    lacking = "shared model" if federation.shared is None else "test data"
    is_evaluated = federation.shared is not None and any(each is not None for each in tests)
    rule = f"be left out in a deployment whose server evaluates nothing: it has no {lacking}"
    checks.require(is_evaluated or not config.run.metrics, "run.metrics", rule, config.run.metrics)


def require_server(config: Config, keys: str) -> None:
    """Refuses what no server does: keep the best round, release metrics, draw from a known seed."""
    rule = "be 'last' in a deployment, whose server has the newest state alone"
    checks.require(config.run.keep == "last", "run.keep", rule, config.run.keep)
    noise, rule = config.evaluation.noise_multiplier, "be none in a deployment"
    checks.require(noise is None, "evaluation.noise_multiplier", rule, noise)
    units, is_secret = config.privacy.units, config.run.secret
    rule = (
        f"be true to deploy privacy of {' and '.join(units)}s: the nodes have the configuration, "
        "whose seed is otherwise the root of cohorts and noise (not needed with keys 'parity', for "
        "tests)"
    )
    checks.require(is_secret or not units or keys == "parity", "run.secret", rule, is_secret)


def _project(name: str, package: str, output: str, flower: str, keys: str) -> dict[str, object]:
    """Returns the `pyproject.toml` that Flower reads."""
    version = importlib.metadata.version(PACKAGE)
    return {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": name,
            "version": "1.0.0",
            "description": f"{name}, simulated and deployed with {PACKAGE} {version}",
            "license": "Apache-2.0",
            "dependencies": [f"flwr=={flower}", f"{PACKAGE}[{_EXTRAS}]=={version}"],
        },
        "tool": {
            "hatch": {"build": {"targets": {"wheel": {"packages": [package]}}}},
            "flwr": {
                "app": {
                    "publisher": PACKAGE,
                    "components": {
                        "serverapp": f"{package}.server:app",
                        "clientapp": f"{package}.client:app",
                    },
                    "config": {
                        "output": output,
                        "keys": keys,
                        "timeout": 600.0,
                        "own-data": False,
                        "scores": "none",
                    },
                }
            },
        },
    }
