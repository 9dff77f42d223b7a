"""R-DPCFL and RC-DPFL: clusters from one round with little noise, drawn softly, then chosen."""

import enum
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting import DpEvent

from fedjax_dp.algorithms.base import (
    ClientOutput,
    ClientState,
    FederatedAlgorithm,
    HostStep,
    Hyper,
    Needs,
    Numbers,
    Recipient,
    Stages,
    claim_of,
    training_of,
    views_of_clusters,
)
from fedjax_dp.clients.base import LocalConfig, LocalTrainer
from fedjax_dp.clients.batches import WHOLE, WholeBatches, check_copies, gaussian_copies
from fedjax_dp.clients.selection import (
    RANGES,
    Choice,
    make_choice,
    only_chosen,
    trained_and_chosen,
    without_steps,
)
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.masks import Sparse
from fedjax_dp.core.messages import Choices
from fedjax_dp.core.ranges import Count, Fraction, Index, Positive
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.augmentation import Transform
from fedjax_dp.models.base import Model
from fedjax_dp.privacy.claims import RecordClaim
from fedjax_dp.server.clustering import (
    ClusterAggregate,
    Mixture,
    Similarity,
    fit_best_mixture,
    fit_mixture,
    mean_per_cluster,
    no_similarity,
    num_soft_rounds,
    principal_features,
)
from fedjax_dp.server.mean import ModelChoice

NOT_COVERED = (
    "which cluster a client chose, by exact loss on its data: the ε stated here is that of its "
    "updates alone"
)


_OWN_RANGES: Mapping[str, Any] = {
    "num_selections": Index,
    "soft_rounds": Index,
    "first_batch_size": Count,
}


class ClusterCount(NamedTuple):
    """How many clusters there are.

    Attributes:
      num_models: number of clusters (M); None for the number with the best separated mixture.
      max_models: the largest M to try if M is not given.
      separation: the score by which M is found, if it is not given: "plain", the smallest
        separation of two clusters (MSS), or "adjusted", see `fit_best_mixture`.
    """

    num_models: Count | None = None
    max_models: Count = 10
    separation: Literal["adjusted", "plain"] = "adjusted"


class SelectionRule(NamedTuple):
    """How clients choose among the models of clusters.

    Attributes:
      selection: "private" by the exponential mechanism, or "exact" by loss.
      selection_epsilon: ε of one private choice, above 0; the authors take 0.03 of the total.
      num_selections: rounds with a choice; by default ⌊E/10⌋, or all if choices are exact.
      score: the criterion of a private choice, "accuracy" or "loss".
      loss_bound: the largest loss of one example that counts.
    """

    selection: Literal["private", "exact"] = "private"
    selection_epsilon: Positive = 0.15
    num_selections: Index | None = None
    score: Literal["accuracy", "loss"] = "accuracy"
    loss_bound: Positive = 5.0


class SoftClusters(NamedTuple):
    """How the updates of the first round are clustered, and how long clusters stay soft.

    Attributes:
      num_components: principal components that are clustered; M clusters differ in up to M - 1.
        The published code has 2, which can hide one of four clusters.
      features: "centred", or "authors" for the published code's projection.
      soft_rounds: E_c, the last round of soft clusters; None for what the mixture implies.
    """

    num_components: Count = 3
    features: Literal["centred", "authors"] = "centred"
    soft_rounds: Index | None = None


class FirstRound(NamedTuple):
    """The batches of the first round.

    Attributes:
      first_batch_size: b¹, the batch size of the first round, drawn and charged by the trainer's
        sampler; whole for a client that has no more records. None for whole batches. The number of
        epochs is that of the trainer, so that larger batches take fewer steps; the number of steps
        is, if the trainer has one. A sweep may make it smaller, not larger.
      num_copies: instances of each record in whole batches of the first round: itself, and
        perturbed copies of it. A record's gradient is then the mean of its copies' clipped
        gradients. 1 if `first_batch_size` is given.
      copy_stddev: the standard deviation of Gaussian noise on the inputs of copies, above 0.
      perturb: makes a copy in another way, `(example, key) -> example` of one record.
    """

    first_batch_size: Count | None = None
    num_copies: Count = 1
    copy_stddev: Positive | None = None
    perturb: Transform | None = None


class Stage(enum.IntEnum):
    """The stages of a run."""

    FIRST = 0  # One step on the whole data, whose updates are clustered and then discarded.
    SOFT = 1  # Clients draw their cluster from the mixture.
    SELECT = 2  # Clients choose their cluster on their own data.
    FROZEN = 3  # Clients remain in the cluster that they chose last.
    LAST = 4  # Clients choose their cluster and train nothing.


class Message(NamedTuple):
    """The models a client may train, and its probabilities `[models]`; zeros if it draws none."""

    models: Choices
    chances: Sparse


class ServerState(NamedTuple):
    """The models of all clusters, and the mixture fitted to the first round's updates."""

    models: PyTree  # Parameters, `[models, ...]`; those beyond `num_models` are never trained.
    similarity: Similarity  # Inner products of the first round's updates.
    features: Any  # Of those updates, `[clients, features]`.
    means: Any  # Of the mixture's components, `[models, features]`.
    radii: Any  # Of the mixture's components, `[models]`.
    # Probability of each client to belong to each cluster, `[clients, models]`.
    responsibilities: Any
    separation: Any  # The smallest separation score of two clusters (MSS), float32.
    overlap: Any  # The largest overlap of two clusters (MPO), float32.
    num_iterations: Any  # Of expectation-maximisation, by which the mixture was found, int32.
    num_models: Any  # Number of clusters (M), int32.
    soft_rounds: Any  # The last round of soft clustering (E_c), rounds counting from 1, int32.


@checked
def r_dpcfl(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_clients: Count,
    num_rounds: Count,
    clusters: ClusterCount = ClusterCount(),
    selection_rule: SelectionRule = SelectionRule(),
    soft_clusters: SoftClusters = SoftClusters(),
    ends_with_choice: bool = False,
    is_weighted: bool = False,
    first_round: FirstRound = FirstRound(),
    name: str = "r_dpcfl",
) -> FederatedAlgorithm:
    """Declares R-DPCFL: private clustered federated learning that is robust to its own noise.

    In the first round every client takes each step on all of its data, or on a large batch, which
    makes the noise in its update small enough to cluster by. A mixture of Gaussians on the updates'
    principal components gives each client's probability to belong to each cluster; until round E_c
    clients draw their cluster from it. Then they choose on their own training data, in a tenth of
    all rounds, and remain there. The less the clusters overlap, the larger E_c.

    Guarantee: unit of privacy is one record of one client; the relation is that of the trainer's
    event, and private choices hold under both. A round is charged by its stage, so that
    the batches of the first round, those after it and the choices are composed jointly.
    With `selection="exact"` the choices are not covered, and the declaration says so.

    Args:
      model: the model to train.
      trainer: a private trainer, such as `dp_sgd_trainer`; whole batches of the first round do not
        use its sampler, and its micro-batches are as large as in all others.
      num_clients: the population, at least 1.
      num_rounds: rounds of the whole run (E), at least 1.
      clusters: how many clusters there are.
      selection_rule: how clients choose among the models.
      soft_clusters: how the updates of the first round are clustered.
      ends_with_choice: make the last round a choice alone, in addition to `num_selections`: clients
        choose among the trained models, train nothing, and have the model that they chose. E is
        then one less than `num_rounds`, which must be at least 2.
      is_weighted: weight clients by their number of examples within a cluster.
      first_round: the batches of the first round.
      name: the name in reports.

    Returns:
      The algorithm; a client's state is the index of the model that it last trained or chose.

    Raises:
      ValueError: for a trainer that does not fit, or numbers out of range.

    Source: Malekmohammadi and others 2025 (R-DPCFL), algorithm 1.
    """
    trainer.private_claim()  # Refuses a trainer that is not private.
    trainer = _reading_whole(trainer, first_round)
    num_models, max_models, separation = clusters
    num_components, features, soft_rounds = soft_clusters
    capacity = max_models if num_models is None else num_models
    checks.whole("num_models", capacity)
    rule = "be 'adjusted' if num_models is given, since nothing is left to compare"
    checks.require(num_models is None or separation == "adjusted", "separation", rule, separation)
    choice = make_choice(model, selection_rule.selection, selection_rule.score)
    num_trained = rounds_of_training(num_rounds, ends_with_choice)
    given = {"soft_rounds": soft_rounds, "first_batch_size": first_round.first_batch_size}
    numbers = numbers_of(selection_rule, num_rounds, num_trained) | {
        number: value for number, value in given.items() if value is not None
    }

    def client(message, own, client, hyper, key):
        own_key = fold(key, Purpose.SELECTION)
        chosen = _choose(choice, message, own, client, hyper, own_key)
        is_first, is_last = client.stage == Stage.FIRST, client.stage == Stage.LAST
        usual = jnp.asarray(hyper.local.batch_size, jnp.float32)
        batch = jnp.where(is_first, _first_batch(hyper, client.size), usual)
        local = hyper.local._replace(batch_size=batch)
        models = message.models
        return trained_model(trainer, models, chosen, client, local, is_last, is_weighted, key)

    def cluster(server, clients, hyper, key):
        features = principal_features(server.similarity, num_components)
        server = server._replace(features=np.float32(features))
        seen = features[np.asarray(server.similarity.is_seen)]
        if len(seen) < 2:
            return server
        mixture = _mixture_of(seen, clusters, key)
        implied = num_soft_rounds(mixture.overlap, num_trained)
        return _with_mixture(server, mixture, hyper.algorithm.get("soft_rounds", implied))

    def stage_of(server, hyper, round_index):
        stage = _stage_of(server, hyper, round_index)
        is_last = ends_with_choice & (round_index + 1 == num_rounds)
        return jnp.where(is_last, Stage.LAST, stage).astype(jnp.int32)

    events = _events(trainer, choice)
    if ends_with_choice:
        events = *events, only_chosen(choice)
    not_covered = NOT_COVERED if choice.event is None else None
    return FederatedAlgorithm(
        name=name,
        init=lambda key: _first_state(model.init(key), capacity, num_clients, num_components),
        broadcast=_broadcast,
        client=client,
        aggregator=mean_per_cluster(capacity, num_clients, features=features),
        server_step=_server_step,
        training=training_of(trainer, record=RecordClaim(events, not_covered)),
        numbers=Numbers(num_clients=num_clients),
        views=views_of_clusters(lambda server, own, client: own),
        client_state=ClientState(init=lambda server: jnp.int32(0), known=lambda own: own),
        stages=Stages(
            stage_of=stage_of,
            host_steps=(HostStep(1, cluster, reads_clients=False),),
            choice=choice,
        ),
    ).with_numbers(numbers, {**RANGES, **_OWN_RANGES}, _no_larger_than(first_round))


def _no_larger_than(first_round: FirstRound) -> Callable[[Hyper], None]:
    """Returns the check that first batches are no larger than the ones that memory is kept for."""
    built = first_round.first_batch_size or 0

    def check(hyper: Hyper) -> None:
        asked = hyper.algorithm.get("first_batch_size", 0)
        fits = checks.is_traced(asked) or bool(np.all(np.asarray(asked) <= built))
        rule = f"be at most {built}, as it was built"
        checks.require(fits, "first_batch_size", rule, asked)

    return check


def _first_state(
    start: PyTree, capacity: int, num_clients: int, num_components: int
) -> ServerState:
    """Makes the state before the first round, in which all models are the same."""
    return ServerState(
        models=jax.tree.map(lambda p: jnp.broadcast_to(p, (capacity, *p.shape)), start),
        similarity=no_similarity(num_clients),
        features=jnp.zeros((num_clients, num_components)),
        means=jnp.zeros((capacity, num_components)),
        radii=jnp.zeros(capacity),
        responsibilities=jnp.full((num_clients, capacity), 1 / capacity),
        separation=jnp.float32(0),
        overlap=jnp.float32(1),
        num_iterations=jnp.int32(0),
        num_models=jnp.int32(capacity),
        soft_rounds=jnp.int32(0),
    )


def numbers_of(rule: SelectionRule, num_rounds: int, num_trained: int) -> dict[str, Any]:
    """Collects the numbers of choices; without a number of them, as many as the rule implies."""
    count = rule.num_selections
    if count is None:
        count = num_rounds if rule.selection == "exact" else num_trained // 10
    return {
        "selection_epsilon": rule.selection_epsilon,
        "loss_bound": rule.loss_bound,
        "num_selections": count,
    }


def trained_model(
    trainer: LocalTrainer,
    models: Choices,
    chosen: jax.Array,
    client: Any,
    config: LocalConfig,
    is_last: jax.Array,
    is_weighted: bool,
    key: Any,
) -> ClientOutput:
    """Trains the chosen model, by no step in a last round that is a choice alone."""
    config = without_steps(config, is_last)
    result = trainer.train(models.take(chosen), client, config, key)
    weight = result.weight if is_weighted else (result.weight > 0).astype(jnp.float32)
    # Noise that clients add to an update would move models that no client trained.
    weight = jnp.where(is_last, 0.0, weight)
    return ClientOutput(ModelChoice(chosen, result.delta), weight, chosen, result.metrics)


def rounds_of_training(num_rounds: int, ends_with_choice: bool) -> int:
    """Counts the rounds before a last one that is a choice alone, if there is one."""
    rule = "be at least 2 if the last round is a choice alone"
    checks.require(num_rounds >= 2 or not ends_with_choice, "num_rounds", rule, num_rounds)
    return num_rounds - int(ends_with_choice)


def _stage_of(server: ServerState, hyper: Hyper, round_index: Any) -> jax.Array:
    """Finds the stage of all rounds but the last; without a mixture, choices begin in round 2."""
    e = round_index + 1
    first_selection = jnp.maximum(server.soft_rounds + 1, 2)
    stage = jnp.where(e < first_selection, Stage.SOFT, Stage.SELECT)
    last_selection = first_selection + hyper.algorithm["num_selections"]
    stage = jnp.where(e >= last_selection, Stage.FROZEN, stage)
    return jnp.where(e == 1, Stage.FIRST, stage).astype(jnp.int32)


def _first_batch(hyper: Hyper, size: Any) -> jax.Array:
    """Returns the batch size of the first round, float32; whole if a client has no more records."""
    wanted = jnp.asarray(hyper.algorithm.get("first_batch_size", WHOLE), jnp.float32)
    return jnp.where(wanted < jnp.asarray(size, jnp.float32), wanted, WHOLE)


def _broadcast(server: ServerState, client: Recipient) -> Message:
    """Sends all models if a client chooses or draws, else its last; and its probabilities."""
    is_soft = client.stage == Stage.SOFT
    sends_all = is_soft | _is_choosing(client.stage)
    chances = server.responsibilities[client.index]
    return Message(
        Choices(server.models, server.num_models, sends_all, client.known),
        Sparse(chances, jnp.full(chances.shape, is_soft), is_known=True),
    )


def _is_choosing(stage: Any) -> Any:
    return (stage == Stage.SELECT) | (stage == Stage.LAST)


def _choose(
    choice: Choice, message: Message, own: jax.Array, client: Any, hyper: Hyper, key: Any
) -> jax.Array:
    """Returns the last model, draws one, or chooses one, by stage."""
    models = message.models
    chances = jnp.log(message.chances.values)
    is_offered = jnp.arange(len(chances)) < models.num_offered
    # All clients are at the same stage, so only one branch is computed under vmap too.
    chosen = jax.lax.switch(
        jnp.where(_is_choosing(client.stage), Stage.SELECT, client.stage),
        [
            lambda: own,
            lambda: jax.random.categorical(key, chances).astype(jnp.int32),
            lambda: choice.of(key, models.offered(), client, is_offered, hyper.algorithm),
            lambda: own,
        ],
    )
    return jnp.where(client.size > 0, chosen, own)


def _server_step(server, aggregate: ClusterAggregate, hyper, round, key):
    """Moves the models; the first round's updates determine only the similarity."""
    is_first = round.stage == Stage.FIRST
    moved = optax.apply_updates(server.models, aggregate.mean)
    return server._replace(
        models=trees.where(is_first, server.models, moved),
        similarity=trees.where(is_first, aggregate.similarity, server.similarity),
    ), {}


def _mixture_of(seen: np.ndarray, clusters: ClusterCount, key: Any) -> Mixture:
    """Fits the mixture to features `[clients, features]`, with the best M if none is given."""
    seed = int(np.asarray(jax.random.bits(key, (), jnp.uint32)))
    if clusters.num_models is not None:
        return fit_mixture(seen, min(clusters.num_models, len(seen)), seed)
    candidates = range(2, max(2, min(clusters.max_models, len(seen) - 1)) + 1)
    return fit_best_mixture(seen, candidates, seed, separation=clusters.separation)


def _with_mixture(server: ServerState, mixture: Mixture, soft_rounds: Any) -> ServerState:
    """Adds a mixture to the server's state; a client that was not seen may be in any cluster."""
    count = len(mixture.means)
    responsibilities = np.zeros_like(server.responsibilities)
    responsibilities[:, :count] = 1 / count
    responsibilities[np.asarray(server.similarity.is_seen), :count] = mixture.responsibilities
    means, radii = np.zeros_like(server.means), np.zeros_like(server.radii)
    means[:count], radii[:count] = mixture.means, mixture.radii
    return server._replace(
        means=means,
        radii=radii,
        responsibilities=responsibilities,
        separation=np.float32(mixture.separation),
        overlap=np.float32(mixture.overlap),
        num_iterations=np.int32(mixture.num_iterations),
        num_models=np.int32(count),
        soft_rounds=np.int32(soft_rounds),
    )


def _events(trainer: LocalTrainer, choice: Choice) -> tuple[Callable[..., DpEvent], ...]:
    """Lists the event of a round for each stage."""
    trained = claim_of(trainer, lambda hyper: hyper.local)
    assert trained is not None
    (train_event,) = trained.events

    def first_event(size, hyper):
        first = hyper.local._replace(batch_size=float(_first_batch(hyper, size)))
        return train_event(size, hyper._replace(local=first))

    return first_event, train_event, trained_and_chosen(train_event, choice), train_event


def _reading_whole(trainer: LocalTrainer, first_round: FirstRound) -> LocalTrainer:
    """Makes the trainer of first batches that are whole, with copies if requested, or large."""
    if trainer.reading_whole is None:
        raise ValueError(
            "trainer must offer whole batches, as `local_trainer` does, got one that does not"
        )
    _require_whole(first_round._asdict())
    first_batch_size, num_copies, stddev, perturb = first_round
    if perturb is None:
        check_copies(first_round._asdict())
        if stddev is None:
            return trainer.reading_whole(WholeBatches(largest=first_batch_size or 0))
        return trainer.reading_whole(gaussian_copies(num_copies, stddev))
    checks.require(stddev is None, "copy_stddev", "be None if `perturb` is given", stddev)
    rule = "be at least 2 if copies are perturbed"
    checks.require(num_copies >= 2, "num_copies", rule, num_copies)
    return trainer.reading_whole(WholeBatches(num_copies, perturb))


def _require_whole(options: Mapping[str, Any]) -> None:
    """Requires whole first batches for copies: a record of a drawn batch has none."""
    batch, copies = options.get("first_batch_size"), options["num_copies"]
    rule = "be left out with copies of records, which are those of whole batches"
    checks.require(batch is None or copies == 1, "first_batch_size", rule, batch)


def needs_of_copies(options: Mapping[str, Any]) -> Needs:
    """Refuses copies without noise, noise without copies, and copies in batches that are drawn."""
    _require_whole(options)
    check_copies(options)
    return Needs()


class SoftPhase(NamedTuple):
    """How long clusters stay soft, and when clients are assigned to them.

    Attributes:
      soft_share: E_c as a share of E, the rounds with training; the paper gives no value.
      assignment: when clusters are assigned, "start" of a round as in `r_dpcfl`, or "end" of the
        round before, as in the paper: soft clusters then last one round longer, until E_c + 1, and
        the last of E + 1 rounds is a choice among the trained models.
    """

    soft_share: Fraction = 0.5
    assignment: Literal["start", "end"] = "start"


@checked
def rc_dpfl(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_clients: Count,
    num_rounds: Count,
    num_models: Count,
    soft_phase: SoftPhase = SoftPhase(),
    num_components: Count = 3,
    features: Literal["centred", "authors"] = "centred",
    first_round: FirstRound = FirstRound(),
) -> FederatedAlgorithm:
    """Declares RC-DPFL: a mixture on the first round's updates, then exact choices by loss.

    Unlike in R-DPCFL, the number of clusters is given, soft clusters end after a fixed share of the
    rounds, clients choose the model of smallest exact training loss in every later round, and a
    cluster's mean is weighted by size.

    Guarantee: that of DP-SGD for the updates only. The choices read the data without noise and are
    not covered; the declaration says so.

    Args:
      model: the model to train.
      trainer: as for `r_dpcfl`.
      num_clients: the population, at least 1.
      num_rounds: rounds of the whole run, at least 1.
      num_models: number of clusters (M), at least 1.
      soft_phase: how long clusters stay soft, and when clients are assigned to them.
      num_components: as for `r_dpcfl`.
      features: as for `r_dpcfl`.
      first_round: as for `r_dpcfl`.

    Returns:
      The algorithm.

    Raises:
      ValueError: as `r_dpcfl`.

    Source: Malekmohammadi and others 2024 (RC-DPFL), algorithm 1.
    """
    is_at_end = soft_phase.assignment == "end"
    num_trained = rounds_of_training(num_rounds, is_at_end)
    soft_rounds = int(soft_phase.soft_share * num_trained) + int(is_at_end)
    return r_dpcfl(
        model,
        trainer,
        num_clients=num_clients,
        num_rounds=num_rounds,
        clusters=ClusterCount(num_models),
        selection_rule=SelectionRule("exact"),
        soft_clusters=SoftClusters(num_components, features, soft_rounds),
        ends_with_choice=is_at_end,
        is_weighted=True,
        first_round=first_round,
        name="rc_dpfl",
    )
