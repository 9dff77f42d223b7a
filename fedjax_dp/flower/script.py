"""Nodes whose clients are trained by a script of the participant's own."""

import json
import time
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm, Stages
from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.core import checks, trees
from fedjax_dp.core.disclosure import in_public
from fedjax_dp.core.marks import mark, marks_reaching
from fedjax_dp.core.messages import Form, received
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.cohort import traced, typed
from fedjax_dp.engine.facts import FederationFacts, Population
from fedjax_dp.engine.sides import Received, Work, contributed, run_client
from fedjax_dp.flower.agreement import with_seeds
from fedjax_dp.flower.exchange import Exchange, Task, decoded, require_fit, until
from fedjax_dp.flower.plan import Plan
from fedjax_dp.flower.request import Request
from fedjax_dp.flower.terms import Script
from fedjax_dp.server.secure.key_agreement import SeedTable

# The part of the server's patience that a node waits for a script; the rest is for its reply.
_SHARE = 0.9


def require_difference(algorithm: FederatedAlgorithm, population: Population) -> None:
    """Requires clients without states, claims or choices, which send what training changed."""
    name = _offered(algorithm)
    message = jax.eval_shape(received, FederationFacts(algorithm, population).down[0])
    forms: list[Any] = []

    def one(message: PyTree, data: PyTree, index: jax.Array) -> ClientOutput:
        numbers = jax.tree.map(jnp.asarray, traced(algorithm, typed(algorithm.hyper)))
        hyper = numbers.of_client(index)
        # No training at all.
        num_steps = None if hyper.local.num_steps is None else jnp.int32(0)
        local = hyper.local._replace(num_epochs=jnp.float32(0), num_steps=num_steps)
        hyper = hyper._replace(local=local, algorithm=jax.tree.map(mark, hyper.algorithm))
        client = ClientData(data, index, index, index, population.limit, round=index, stage=index)
        output = run_client(algorithm, message, None, client, hyper, jax.random.key(0))
        forms.append(None if output.training is None else output.training.form)
        return output._replace(update=output.received, training=None, info={})

    arguments = message, population.structure, jax.ShapeDtypeStruct((), jnp.int32)
    closed, found = jax.make_jaxpr(one, return_shape=True)(*arguments)
    is_plain = _kinds(found.update) == _kinds(message) and forms[0] in (None, Form())
    checks.require(is_plain, name, "send the difference of two models", "another update")
    rule, own = "use its own numbers on the server alone", sorted(algorithm.numbers.values)
    checks.require(not any(marks_reaching(closed).outputs), name, rule, own)
    ones = [jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), each) for each in arguments[:2]]
    output = jax.jit(one)(*ones, jnp.int32(1))
    is_zero = not any(np.any(x) for x in jax.tree.leaves(output.update))
    checks.require(is_zero, name, "send zeros where nothing is trained", "another update")
    checks.require(float(output.weight) == 1, name, "weigh clients by size", output.weight)


def _offered(algorithm: FederatedAlgorithm) -> str:
    """Refuses what is seen from a declaration alone; returns the subject of further errors."""
    name = f"a training script cannot take part in {algorithm.name}, which"
    rule = "claim no privacy for records, as the package did not clip their gradients"
    checks.require(algorithm.claims.record is None, name, rule, "a claim")
    checks.require(algorithm.client_state is None, name, "have no client state", "some")
    checks.require(algorithm.stages == Stages(), name, "have rounds of one kind", "several")
    return name


def _kinds(tree: PyTree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(tuple(x.shape), np.dtype(x.dtype).name) for x in leaves]


def prepare(script: Script | None) -> None:
    """Makes the folder in which node and script meet, which the script waits for."""
    if script is not None:
        Exchange(script.folder)


def trained_by(script: Script, plan: Plan, request: Request) -> "Trained":
    """Passes the model of a round to the script and waits for the trained parameters."""
    with in_public():
        _offered(plan.algorithm)
    exchange, message = Exchange(script.folder), request.received[0].message
    deadline = time.time() + _SHARE * request.wait
    links = list(request.clients)
    task = Task(plan.digest, request.round, script.rounds, links, deadline, True)
    model = named(message)
    exchange.open(task, model)
    until(lambda: not exchange.missing(task), deadline)
    params: dict[int, PyTree] = {}
    structure = jax.tree.structure(message)
    for link, content in exchange.close(task).items():
        try:
            # Checked by `push`; a file that something else wrote is not.
            arrays = decoded(content)
            require_fit(arrays, model)
        except ValueError as error:
            warnings.warn(f"the update of data link {link} counts as lost: {error}", stacklevel=2)
            continue
        params[link] = jax.tree.unflatten(structure, [arrays[name] for name in model])
    return Trained(params, reports(script, plan.digest, request.scores_from))


def reports(script: Script, digest: str, start: int | None) -> dict[str, Any]:
    """Takes the scores that no reply has carried, as facts, if they are asked for and sent."""
    if not script.sends_scores or start is None:
        return {"scores": ""}
    found, end = Exchange(script.folder).unsent_scores(digest, None if start < 0 else start)
    return {"scores": json.dumps(found) if found else "", "scores end": end}


class Trained(NamedTuple):
    """What a script has pushed in a round."""

    params: Mapping[int, PyTree]  # By client; none of a client that was not trained in time.
    scores: Mapping[str, Any]  # Facts of the reply, from `reports`.

    def work(
        self,
        plan: Plan,
        received: Received,
        client: int,
        size: int,
        key: Any,
        seeds: SeedTable | None,
    ) -> Work:
        """Makes what a client sends: clipped, encoded, with its share of noise, by the package."""
        takes_part = client in self.params
        params = self.params.get(client, received.message)
        at = jnp.int32(client), jnp.float32(size), jnp.bool_(takes_part)
        return _work(plan, received, params, *at, key, seeds)


@partial(jax.jit, static_argnums=0)
def _work(
    plan: Plan,
    received: Received,
    params: PyTree,
    client: Any,
    weight: Any,
    part: Any,
    key: Any,
    seeds: SeedTable | None,
) -> Work:
    output = ClientOutput(trees.subtract(params, received.message), weight, None)
    algorithm = plan.algorithm if seeds is None else with_seeds(plan.algorithm, seeds)
    return contributed(algorithm, received, output, client, key, part)


def named(message: PyTree) -> dict[str, np.ndarray]:
    """Names the leaves of a model by path, as exported parameters are."""
    leaves = jax.tree.leaves(message)
    return {name: np.asarray(x) for name, x in zip(trees.paths(message), leaves, strict=True)}
