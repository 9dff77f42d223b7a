"""Secure aggregation as configured: the graph of masks, and an algorithm's messages under them."""

import math
from itertools import cycle, islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.core import checks
from fedjax_dp.core.decimals import shown
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.facts import FederationFacts, Population
from fedjax_dp.experiment.schema.config import (
    Config,
    DiscreteGaussianLevel,
    SecureAggregationSection,
)
from fedjax_dp.experiment.schema.constraints import keyed
from fedjax_dp.privacy.mechanisms.distributed import Plan
from fedjax_dp.server.base import Roster, Sender, Summed
from fedjax_dp.server.secure import (
    FixedPoint,
    MaskGraph,
    MaskKeys,
    agreed_keys,
    all_pairs,
    fixed_point,
    masked,
    masking_facts,
    random_neighbors,
    words,
)

# Integer bits of words by default.
_USUAL_BITS = 4


def graph_of(config: Config, participation: Participation) -> MaskGraph | None:
    """Builds the graph of masks for the smallest round; None without secure aggregation."""
    section, leaving = config.secure_aggregation, config.leaving
    if section.form is None:
        return None
    sampler = participation.sampler
    rule = (
        "draw cohorts of a fixed size under secure_aggregation, whose graph is for the smallest "
        "cohort: a round of fewer clients is lost"
    )
    checks.require(not sampler.varies, "participation.sampler", rule, sampler.name)
    count = participation.min_drawn
    rule = "be at least 2 under secure_aggregation"
    checks.require(count >= 2, "the number of clients of a round", rule, count)
    rule = f"leave at least 2 of the {count} clients of a round"
    checks.require(section.absent <= count - 2, "secure_aggregation.absent", rule, section.absent)
    count -= section.absent
    if leaving.tolerance is not None:
        away = participation.num_clients - leaving.min_active
        least = participation.num_clients - count + 2 + section.colluders + section.dropouts
        rule = (
            f"be at least {least} under secure_aggregation, so that 2 clients of a round are left "
            f"in addition to {section.colluders} colluders and {section.dropouts} drop-outs"
        )
        checks.require(leaving.min_active >= least, "leaving.min_active", rule, leaving.min_active)
        count -= away
    if config.communication.servers:
        smallest = int(np.bincount(servers_of(config, participation.num_clients)).min())
        count -= participation.num_clients - smallest
        rule = "give each server at least 2 clients of a round under secure_aggregation"
        checks.require(count >= 2, "communication.servers", rule, config.communication.servers)
    options: dict[str, Any] = {"colluders": section.colluders, "dropouts": section.dropouts}
    # Sums of the largest cohort must fit into words too.
    _encoding(section, participation)
    with keyed("secure_aggregation"):
        if section.graph == "all_pairs":
            return all_pairs(count, **options)
        if section.failure is not None:
            options["failure"] = section.failure
        return random_neighbors(count, num_neighbors=section.num_neighbors, **options)


def servers_of(config: Config, num_clients: int) -> list[int]:
    """Lists the server of each client, in turn if there are fewer."""
    return list(islice(cycle(config.communication.servers), num_clients))


def checked_graph(config: Config, participation: Participation) -> MaskGraph | None:
    """Builds the graph, and checks that the claim holds against those whom it is for."""
    section, privacy, num_rounds = config.secure_aggregation, config.privacy, config.run.rounds
    graph = graph_of(config, participation)
    has_shares = "client" in privacy.units and isinstance(privacy.client, DiscreteGaussianLevel)
    if graph is None or not has_shares:
        return graph
    for name, without in (("word_bits", 32), ("integer_bits", None), ("fraction_bits", None)):
        rule = f"be {without or 'none'} for discrete_gaussian, whose clients send integers"
        value = getattr(section, name)
        checks.require(value == without, f"secure_aggregation.{name}", rule, value)
    dp_delta, exposed = privacy.client.dp_delta, num_rounds * graph.secrecy_failure
    allowed, found = (shown("dp_delta", value) for value in (dp_delta, exposed))
    rule = (
        f"keep messages secret in all {num_rounds} rounds but with a probability of at most "
        f"privacy.client.dp_delta = {allowed}, which it adds to: choose more neighbours or a "
        "smaller secure_aggregation.failure"
    )
    checks.require(exposed <= dp_delta, "secure_aggregation.graph", rule, found)
    return graph


def under_masks(
    section: SecureAggregationSection,
    graph: MaskGraph | None,
    participation: Participation,
    algorithm: FederatedAlgorithm,
    population: Population,
) -> tuple[FederatedAlgorithm, MaskKeys | None]:
    """Puts messages under masks, whose words hold the largest weight; also returns the keys."""
    if graph is None or section.form is None:
        return algorithm, None
    rule = f"be left out for {algorithm.name}, whose server needs the message of each client"
    aggregator = algorithm.aggregator
    is_summed = isinstance(aggregator, Summed)
    checks.require(is_summed, "secure_aggregation.form", rule, section.form)
    assert isinstance(aggregator, Summed)
    keys = None if section.keys == "simulated" else agreed_keys(participation.num_clients)
    encoding = _encoding(section, participation, _largest_weight(algorithm, population))
    mean = masked(aggregator, encoding, graph, keys=keys, form=section.form)
    return algorithm._replace(aggregator=mean), keys


def stated_facts(
    section: SecureAggregationSection,
    graph: MaskGraph | None,
    keys: MaskKeys | None,
    plan: Plan | None,
) -> dict[str, Any]:
    """Collects what a statement says of masks, and who is trusted if clients add the noise."""
    if graph is None or section.form is None:
        return {}
    facts = masking_facts(graph, plan, keys=keys, form=section.form)
    trust = {} if plan is None else {"trust": "honest_but_curious"}
    return {"secure_aggregation": facts, **trust}


def _largest_weight(algorithm: FederatedAlgorithm, population: Population) -> int:
    """Finds the largest float that a client sends with an update of zeros, at least 1."""
    aggregator, key = algorithm.aggregator, jax.random.key(0)
    shapes = FederationFacts(algorithm, population).update
    update = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    weight = jnp.float32(np.max(population.sizes))
    sender = Sender(jnp.int32(0), weight, key, key, Roster.of_one())
    state = aggregator.broadcast(aggregator.init(update))
    sent = jax.tree.leaves(aggregator.contribute(state, aggregator.numbers, update, sender))
    floats = [x for x in map(np.asarray, sent) if np.issubdtype(x.dtype, np.floating)]
    return max(1, *(math.ceil(np.max(np.abs(x), initial=0)) for x in floats))


def _encoding(
    section: SecureAggregationSection, participation: Participation, largest: int = 1
) -> FixedPoint:
    """Chooses words for floats, those of weights up to the largest included."""
    least, bits = (largest - 1).bit_length(), section.integer_bits
    rule = f"be at least {least}, since messages hold numbers of examples of up to {largest}"
    fits = bits is None or largest == 1 or bits >= least
    checks.require(fits, "secure_aggregation.integer_bits", rule, bits)
    word_bits, count = section.word_bits, participation.capacity
    words.check_words("secure_aggregation.word_bits", word_bits, count)
    options: dict[str, Any] = {"fraction_bits": section.fraction_bits, "word_bits": word_bits}
    if bits is not None:
        options["integer_bits"] = bits
    elif largest > 2**_USUAL_BITS:
        options["integer_bits"] = least
    with keyed("secure_aggregation"):
        return fixed_point(count, **options)
