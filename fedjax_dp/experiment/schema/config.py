"""The keys of a configuration, each with its type, range, default and description."""

import pathlib
import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Ge, Le, MinLen
from pydantic import Field
from pydantic.fields import FieldInfo

from fedjax_dp.core.messages import Encoding
from fedjax_dp.core.ranges import (
    Amount,
    Count,
    Decay,
    Fraction,
    Index,
    NonNegative,
    PathText,
    Pattern,
    Positive,
    Probability,
    ProperFraction,
    Seed,
    Size,
)
from fedjax_dp.data.datasets.cells import without_ending
from fedjax_dp.data.datasets.registry import names_clients
from fedjax_dp.experiment.schema.constraints import refused
from fedjax_dp.experiment.schema.sections import (
    OptionalSection,
    Section,
    given_in,
    is_none,
    sections_in,
)
from fedjax_dp.privacy.accounting.budgets import FACTOR

# Published lists, one number for each of 20, 40 or 60 clients; see `privacy.accounting.budgets`.
NamedBudgets = Annotated[
    str,
    Pattern(
        rf"Dist[1-9]( \* {FACTOR})?",
        'a published list, "Dist1" to "Dist9", also times a number: "Dist2 * 10"',
    ),
]
NamedBatchSizes = Literal["heterogeneous"]
# A quantile of a law, strictly between 0 and 1.
Quantile = Annotated[
    str, Pattern(r"q0?\.\d*[1-9]\d*", 'a quantile between "q0" and "q1", such as "q0.95"')
]
Batches = Literal["auto", "shuffled", "shuffled_whole", "poisson", "fixed_size", "full_batch"]
_T = TypeVar("_T")
# One number for all clients, or one for each: a list by position, a table by name.
Each = Annotated[list[_T], MinLen(1)]
ByName = Annotated[dict[str, _T], MinLen(1)]
ByClass = ByName[NonNegative]
Positives = Positive | Each[Positive] | ByName[Positive]
NonNegatives = NonNegative | Each[NonNegative] | ByName[NonNegative]
Amounts = Amount | Each[Amount] | ByName[Amount]
# Also names a folder, and cannot lead out of its parent.
Name = Annotated[
    str,
    Pattern(
        r"\w[\w .,=+-]*",
        "a plain name of letters, digits, spaces and .,=+-_, not beginning with a sign",
    ),
]
Kept = Annotated[str, Pattern(r"last|best:\w+", 'a kept round, as "last" and "best:test_accuracy"')]
Options = dict[str, Any]


def _setting(default: Any, about: str) -> Any:
    return Field(default, description=about)


def _table(about: str) -> Any:
    return Field(default_factory=dict, description=about)


class RunSection(Section):
    """How long a run is, and how often it is evaluated and saved."""

    name: Name | None = _setting(
        None, "name of the run, for titles and its folder; that of the data if not given"
    )
    # A key holds 32 bits of its seed: beyond them two seeds would share all noise.
    seed: Seed = _setting(0, "root of all random draws, but of those that data.seed determines")
    secret: bool = _setting(
        False, "draw cohorts, batches and noise from a root that only the checkpoint holds"
    )
    release: Literal["private"] | None = _setting(
        None,
        "private: write what may be published to the folder release of the run folder, without "
        "exact figures; needs run.secret",
    )
    rounds: Count = _setting(30, "number of rounds")
    evaluate_every: Count = _setting(1, "rounds between two evaluations")
    keep: Kept = _setting(
        "last",
        "the round whose model a run ends with: last, or best:NAME by a metric of evaluations: an "
        "exact one, such as best:test_accuracy, or best:noised_client_accuracy",
    )
    checkpoint_every: Count = _setting(10, "rounds between two checkpoints")
    plots: bool = _setting(True, "draw plots, PNG and PDF, into the run folder at the end")
    metrics: list[str] = Field(
        default_factory=list,
        description="metrics besides loss and accuracy: perplexity, f1, mcc, calibration_error, "
        "brier_score, auc; confusion and per_class, which are tables; mae, mse and r2 of numbers "
        "and counts; or your own as package.module:name",
    )
    callbacks: Options = _table(
        "callbacks after evaluations, by name, with their options: early_stopping, mlflow, wandb, "
        "trackio, or your own as package.module:name"
    )


class DataSection(Section):
    """The examples, and their partition into clients."""

    name: str = _setting("digits", "data set; `fedjax-dp data list` describes each")
    data_dir: PathText | None = _setting(
        None, "folder of data files; else FEDJAX_DP_DATA, else a cache"
    )
    options: Options = _table("options of the data set's loader; `run --keys data.name=NAME`")
    seed: Seed | None = _setting(
        None,
        "seed of the draws of the data: max_examples, partition, held-out shares and clients; "
        "run.seed if not given",
    )
    max_examples: Count | None = _setting(
        None,
        "training examples to use, drawn at random before any other step; all if not given. The "
        "test part stays whole",
    )
    partition: str = _setting(
        "label_and_quantity_skew",
        "partition of examples into clients; natural by default where the data set names clients, "
        "unless data.num_clients or data.partition_options are given",
    )
    num_clients: Count = _setting(10, "number of clients; natural clients come with the data")
    partition_options: Options = _table(
        "options of the partition; `run --keys data.partition=NAME`"
    )
    client_test_share: Decay = _setting(
        0.2,
        "share of each client's examples held out for it; none by default where natural clients "
        "have test data of their own, which 0 uses too, and 0 where the partition makes test data",
    )
    client_validation_share: Decay = _setting(
        0.0,
        "share of each client's training examples held out for decisions within rounds, such as "
        "when to prune",
    )
    unseen_client_share: Decay = _setting(
        0.0,
        "share of the clients that never take part, drawn by the seed; all their examples are for "
        "testing, and their figures begin with unseen_",
    )
    unseen_clients: list[str] = Field(
        default_factory=list,
        description="the same clients by name; those without names are 0, 1 and so on",
    )
    stratified: bool = _setting(
        False, "draw both shares class by class, so that each keeps the client's share of classes"
    )
    client_numbers: PathText | None = _setting(
        None,
        "CSV file of numbers by client: the first column, client, holds their names; each other "
        "column is named after the key that it fills, such as privacy.record.epsilon",
    )
    public_examples: Index = _setting(
        0,
        "examples without labels, taken out of the pool, for algorithms that query clients on them",
    )
    input_norm: Positive | None = _setting(
        None,
        "L2 norm to which longer inputs are scaled down, each by itself; a model's intercept is "
        "outside of it",
    )
    augmentation: Options = _table(
        "random changes of training records in every step, in this order, by name, with their "
        "options: crop, flip, rotation, color, cutout, or your own as package.module:name; "
        "`run --keys data.augmentation=NAME`"
    )
    augmentation_copies: Count = _setting(
        1,
        "augmented copies of each record in a step; their gradients are averaged, and clipped as "
        "one under record-level privacy",
    )
    check_finite: bool = _setting(True, "refuse data with NaN or infinity before any work")

    def model_post_init(self, _context: Any) -> None:
        """Takes the natural clients of the data set, unless a division is configured."""
        self.__dict__["partition"] = self.partition_for(names_clients(self.name, self.options))

    @property
    def is_divided(self) -> bool:
        """Whether a division of the examples among clients is configured."""
        is_given = not {"partition", "num_clients"}.isdisjoint(self.model_fields_set)
        return is_given or bool(self.partition_options)

    def partition_for(self, has_clients: bool) -> str:
        """Returns the partition of data with natural clients, or without."""
        if self.is_divided:
            return self.partition
        return "natural" if has_clients else type(self).model_fields["partition"].default


class AdaptersSection(OptionalSection):
    """Low-rank adapters (LoRA), if a rank is given: all else of the model is frozen."""

    switch = "rank"

    rank: Count | None = _setting(
        None, "rank of the adapters; the model itself is trained if not given"
    )
    targets: list[str] | ByName[Count] = Field(
        default_factory=list,
        description="paths or patterns, such as params/*/query/kernel, of the kernels that get "
        "one; or a table of how many leading axes of each are inputs",
    )
    alpha: Positive = _setting(16.0, "adapters are added with weight alpha/rank")
    trained: list[str] = Field(
        default_factory=list,
        description="paths or patterns, such as params/head, of parameters to train directly",
    )


class ModelSection(Section):
    """What is trained."""

    name: str = _setting("logistic_regression", "model that is trained")
    options: Options = _table("options of the model; `run --keys model.name=NAME`")
    pretrained: PathText | None = _setting(
        None,
        "file with initial parameters, .safetensors or .npz, with paths such as params/w; for the "
        "models llama and gpt2 also a folder with config.json and safetensors files",
    )
    frozen: list[str] = Field(
        default_factory=list,
        description="paths or patterns, such as params/Conv_0/*, of parameters not to train",
    )
    class_weights: Literal["balanced"] | Each[NonNegative] | ByName[NonNegative] | None = _setting(
        None,
        "factors of the losses of training by class: a list in the order of classes, a table by "
        "their names, or balanced, inverse to their exact counts, which no ε covers",
    )
    adapters: AdaptersSection = Field(default_factory=AdaptersSection)


class AlgorithmSection(Section):
    """The algorithm, and how it aggregates updates."""

    name: str = _setting("dp_sgd", "method by which clients and server train")
    options: Options = _table("options of the algorithm; `run --keys algorithm.name=NAME`")
    aggregator: str | None = _setting(
        None,
        "how updates are aggregated; by the algorithm, or the clients' mechanism, if not given",
    )
    aggregator_options: Options = _table(
        "options of the aggregator; `run --keys algorithm.aggregator=NAME`"
    )


class AccelerationSection(OptionalSection):
    """Anderson acceleration: a round starts from a mix of the results of earlier ones."""

    switch = "memory"

    memory: Count | None = _setting(
        None, "number of earlier rounds to mix; no acceleration if not given"
    )
    of: Literal["shared", "clients"] = _setting(
        "shared", "what to mix: the server's model, or the points of all clients"
    )
    weights: Literal["federation", "equal"] | Each[NonNegative] | None = _setting(
        None,
        "weights of clients in the norm of their points: those of the mean (federation, if not "
        "given), "
        "equal, or a list with one per client; only for of = clients",
    )
    first: Index | None = _setting(None, "plain rounds before it begins; memory + 1 if not given")
    ridge: NonNegative = _setting(1e-10, "regularisation of the small system, over its trace")
    damping: Fraction = _setting(0.0, "share of the plain round in the mix")
    growth: Size = _setting(
        1e4, "restart where a residual is this many times the shortest one in memory"
    )


class LeavingSection(OptionalSection):
    """Clients that leave the run for good, of `warm_start_averaging` and `retrained_averaging`."""

    switch = "tolerance"

    tolerance: Positive | None = _setting(
        None,
        "a client leaves once every parameter of the model that it sent is closer than this to the "
        "mean; no client leaves if not given",
    )
    min_active: Count = _setting(2, "clients that a round needs; with fewer nothing changes")


class AvailabilitySection(OptionalSection):
    """Which clients can be reached; all of them if nothing is given."""

    hours: list[list[float]] | ByName[list[list[float]]] | None = _setting(
        None,
        "windows in which clients can be reached, in hours of simulated time from and to, such as "
        "[[8, 22]], or a table by class of device; needs a clock.deadline",
    )
    first: Index | Each[Index] | None = _setting(
        None, "the first round of clients, from 0, one for all or a list with one per client"
    )
    end: Count | Each[Count] | None = _setting(None, "the first round without them")
    chance: ProperFraction | None = _setting(
        None, "probability that a client leaves at the end of a round"
    )
    return_rounds: Count | None = _setting(
        None, "rounds after which a client that left returns; never if not given"
    )
    return_seconds: Positive | None = _setting(None, "the same, in simulated seconds")


class ClockSection(OptionalSection):
    """A simulated clock, if a key is given: latencies, computation, who is late or away."""

    latencies: PathText | None = _setting(
        None,
        "CSV file of one-way seconds of messages, rows to columns, with the names of places in the "
        "first line and the first column",
    )
    places: list[str] = Field(
        default_factory=list, description="names of places, if there is no file"
    )
    # Numbers, of which a hole is refused with the names of its places.
    seconds: list[list[Any]] = Field(
        default_factory=list,
        description="one-way seconds of messages, a list for each place, if there is no file",
    )
    jitter: NonNegative = _setting(
        0.0, "mean extra delay of each message, exponentially distributed, in seconds"
    )
    server: str | None = _setting(None, "place of the server")
    clients: list[str] = Field(
        default_factory=list, description="places of the clients, repeated cyclically if fewer"
    )
    edges: list[str] = Field(
        default_factory=list,
        description="places of the clients' edge servers, repeated cyclically if fewer",
    )
    classes: list[str] = Field(
        default_factory=list,
        description="classes of the clients' devices, repeated cyclically if fewer",
    )
    per_step: NonNegative | ByClass = _setting(
        0.0, "seconds of one local step, or a table by class of device"
    )
    per_round: NonNegative | ByClass = _setting(
        0.0, "seconds of a round apart from its steps, or a table by class of device"
    )
    spread: NonNegative | ByClass = _setting(
        0.0, "standard deviation of the logarithm of a device's speed, or a table by class"
    )
    server_seconds: NonNegative = _setting(0.0, "seconds that the server takes for a new model")
    start_seconds: NonNegative = _setting(
        0.0, "simulated seconds before the first round; 0 is midnight"
    )
    deadline: Positive | None = _setting(
        None, "seconds after which the server stops waiting in a round"
    )
    dropout: Decay | None = _setting(None, "probability that a client drops out of a round")
    keep: Count | None = _setting(
        None, "updates after which the server stops waiting; choose a larger cohort"
    )
    key_rounds: list[Index] = Field(
        default_factory=list,
        description="rounds, from 0, before which all pairs of clients exchange keys",
    )
    availability: AvailabilitySection = Field(default_factory=AvailabilitySection)


class AsynchronousSection(OptionalSection):
    """Asynchronous rounds, if a concurrency is given: a cohort is the next updates that arrive."""

    switch = "concurrency"

    concurrency: Count | None = _setting(
        None,
        "number of clients that train at any time, by the clock; if not given, rounds wait for all "
        "their clients",
    )
    max_staleness: Index = _setting(
        10,
        "largest staleness of an update that counts, in rounds; the server holds that many states",
    )
    discount: NonNegative = _setting(0.5, "a, for a weight of (1 + staleness)^-a of each update")
    max_participations: Count | None = _setting(
        None, "largest number of updates of one client; no limit if not given"
    )


class TrainingSection(Section):
    """Local training at the clients; numbers may be one for all, a list, or a table by name."""

    optimizer: str = _setting("sgd", "an Optax optimiser that takes a learning rate")
    optimizer_options: Options = _table(
        "options of the optimiser; `run --keys training.optimizer=NAME`"
    )
    learning_rate: NonNegatives = _setting(2.0, "learning rate of local training")
    batch_size: Size | Each[Size] | ByName[Size] | NamedBatchSizes = _setting(
        64.0, "examples per step, expected under Poisson sampling; or a published list"
    )
    num_epochs: Amounts = _setting(1.0, "passes over the client's data in a round")
    num_steps: Amounts | None = _setting(None, "local steps in a round, instead of epochs")
    sampler: Batches = _setting(
        "auto",
        "how batches are drawn; auto is poisson under record-level privacy, else shuffled; "
        "shuffled_whole drops an incomplete last one",
    )
    micro_batch_size: Count | None = _setting(None, "examples computed at once; bounds memory")


class FullParticipation(OptionalSection):
    """Full participation."""

    sampler: Literal["full_participation"] = _setting(
        "full_participation", "how the clients of a round are chosen"
    )


class _Cohort(OptionalSection):
    cohort_size: Positive | None = _setting(None, "(expected) clients per round; all if not given")


class PoissonCohort(_Cohort):
    """Each client joins independently with the same probability."""

    sampler: Literal["poisson"] = _setting("poisson", "how the clients of a round are chosen")
    capacity: Count | None = _setting(None, "slots of a cohort; larger draws are truncated")


class FixedSizeCohort(_Cohort):
    """A fixed number of clients, drawn without replacement."""

    sampler: Literal["fixed_size"] = _setting("fixed_size", "how the clients of a round are chosen")
    full_participation_first: Index = _setting(
        0, "rounds of full participation at the start, such as those of jump_start's first stage"
    )


class CyclicCohort(_Cohort):
    """Clients take turns."""

    sampler: Literal["cyclic"] = _setting("cyclic", "how the clients of a round are chosen")


class MinSeparatedCohort(_Cohort):
    """Clients join at random, with a minimum number of rounds in between."""

    sampler: Literal["min_separated"] = _setting(
        "min_separated", "how the clients of a round are chosen"
    )
    separation: Count = _setting(1, "rounds between two draws of a client")


ParticipationSection = Annotated[
    FullParticipation | PoissonCohort | FixedSizeCohort | CyclicCohort | MinSeparatedCohort,
    Field(discriminator="sampler"),
]


class SecureAggregationSection(OptionalSection):
    """Messages under masks: the server learns the sum of a cohort, and no message of it."""

    switch = "form"

    form: Literal["masked", "cancelled"] | None = _setting(
        None,
        "masked makes and removes every mask; cancelled leaves masks out, with the same sums; no "
        "secure aggregation if not given",
    )
    graph: Literal["all_pairs", "random_neighbors"] = _setting(
        "all_pairs", "which pairs of clients share masks"
    )
    num_neighbors: Count | None = _setting(
        None,
        "neighbours of each client in a random graph, an even number; the fewest that suffice if "
        "not given",
    )
    failure: ProperFraction | None = _setting(
        None, "largest probability that a random graph fails in a round; 2^-40 if not given"
    )
    colluders: Index = _setting(0, "clients of a round that may collude with the server")
    absent: Index = _setting(
        0,
        "clients of a round that may be offline until masks are agreed, such as nodes of a "
        "deployment; more lose the round",
    )
    dropouts: Index = _setting(
        0, "clients of a round that may drop out once masks are agreed; more lose the round"
    )
    word_bits: Literal[32, 64] = _setting(
        32,
        "bits of the words that floats are sent as; 64 make sums finer and messages twice as long, "
        "for rounds of at most 65,536 clients",
    )
    integer_bits: Annotated[int, Ge(-62), Le(61)] | None = _setting(
        None,
        "floats are cut to absolute values of at most 2 to this power; 4 if not given, more where "
        "example counts are sent as weights",
    )
    fraction_bits: Annotated[int, Ge(-61), Le(123)] | None = _setting(
        None, "floats are rounded to multiples of 2 to minus this power; the most that fit if none"
    )
    keys: Literal["simulated", "agreed"] = _setting(
        "simulated", "seeds of masks: folded from the run's key, or agreed by X25519 and HKDF"
    )


class RecordLevel(OptionalSection):
    """The mechanism on records; a noise multiplier, or an ε to calibrate it to."""

    clip_norm: Positives = _setting(1.0, "bound on the L2 norm of one record's gradient")
    noise_multiplier: NonNegatives | None = _setting(
        None, "noise standard deviation over the bound"
    )
    epsilon: Positives | NamedBudgets | None = _setting(
        8.0, "ε at the end of the run, and its budget; or a published list"
    )
    dp_delta: ProperFraction | Each[ProperFraction] | ByName[ProperFraction] = _setting(
        1e-5, "δ of the guarantee, well below 1 / records; one for all clients or one for each"
    )
    per_layer: bool = _setting(False, "clip layer by layer")
    planned_participations: Count | Quantile | None = _setting(
        None,
        "rounds of a client that noise is calibrated for, or a quantile of how often clients are "
        "drawn; its own budget leaves a client out of further ones; all rounds if not given",
    )


class _ClientLevel(OptionalSection):
    """The mechanism on clients' updates; a noise multiplier, or an ε to calibrate it to."""

    clip_norm: Positive = _setting(1.0, "bound on the norm of one client's update")
    noise_multiplier: NonNegative | None = _setting(None, "noise standard deviation over the bound")
    epsilon: Positive | None = _setting(8.0, "ε at the end of the run, and its budget")
    dp_delta: ProperFraction = _setting(1e-5, "δ of the guarantee, well below 1 / clients")
    part_scales: ByName[Positive] | None = _setting(
        None,
        "by part of an update of several, such as params and control of scaffold: what it is "
        "multiplied by before all are clipped together; 1 if not given",
    )

    @property
    def is_realised(self) -> bool:
        """Whether the divisor is the realised cohort size, which voids the guarantee."""
        return False


class _DividedLevel(_ClientLevel):
    denominator: Literal["expected", "realised"] = _setting(
        "expected", "what the noised sum is divided by; realised claims no privacy"
    )

    @property
    def is_realised(self) -> bool:
        """Whether the divisor is the realised cohort size, which voids the guarantee."""
        return self.denominator == "realised"


_ABOUT = (
    "the noise; discrete noise is added by the clients, in shares, unless central, and so is "
    "oblivious noise"
)


_OF_SHARES = (
    "by part of an update of several: its share of the bound, to which it is clipped by itself; "
    "squares add up to 1; all parts are clipped together if not given"
)


class GaussianLevel(_DividedLevel):
    """Gaussian noise on the sum."""

    mechanism: Literal["gaussian"] = _setting("gaussian", _ABOUT)
    per_layer: bool = _setting(False, "clip layer by layer")
    part_shares: ByName[Probability] | None = _setting(None, _OF_SHARES)
    adaptive_clipping: bool = _setting(False, "adapt the bound to a private quantile of norms")
    target_quantile: Fraction = _setting(0.5, "share of updates to leave unclipped, if adaptive")


class LaplaceLevel(_DividedLevel):
    """Laplace noise on the sum."""

    mechanism: Literal["laplace"] = _setting("laplace", _ABOUT)


class StaircaseLevel(_DividedLevel):
    """Staircase noise on the sum."""

    mechanism: Literal["staircase"] = _setting("staircase", _ABOUT)


class BoundedLaplaceLevel(_DividedLevel):
    """Laplace noise on the sum, cut off."""

    mechanism: Literal["bounded_laplace"] = _setting("bounded_laplace", _ABOUT)


class DiscreteGaussianLevel(_ClientLevel):
    """Discrete Gaussian noise in shares of the clients, under secure aggregation."""

    mechanism: Literal["discrete_gaussian"] = _setting("discrete_gaussian", _ABOUT)
    bits: Annotated[int, Ge(2), Le(32)] | Literal["auto"] = _setting(
        16,
        "bits that a client sends for each parameter; auto takes the fewest that cost at most 1 %",
    )
    num_deviations: Positive = _setting(
        4.0, "standard deviations of the sum that the bits can represent; sums beyond wrap around"
    )


class CentralDiscreteLevel(_ClientLevel):
    """Discrete Gaussian noise that the server adds."""

    mechanism: Literal["central_discrete_gaussian"] = _setting("central_discrete_gaussian", _ABOUT)


class CorrelatedGaussianLevel(_DividedLevel):
    """Gaussian noise that is correlated over rounds."""

    mechanism: Literal["correlated_gaussian"] = _setting("correlated_gaussian", _ABOUT)
    per_layer: bool = _setting(False, "clip layer by layer")
    part_shares: ByName[Probability] | None = _setting(None, _OF_SHARES)
    bands: Count = _setting(1, "number of rounds whose noise is correlated")


class ObliviousLevel(_ClientLevel):
    """Laplace noise in gamma shares that no client knows, as of the protocol Π_PPFL."""

    mechanism: Literal["oblivious"] = _setting("oblivious", _ABOUT)
    form: Literal["pairs", "one"] = _setting(
        "pairs", "pairs: a share from each client for each other one; one: that which it draws"
    )
    calibration: Literal["corrected", "variance", "paper"] = _setting(
        "corrected",
        "corrected: one Laplace of the sum has the scale of the multiplier; variance: all of them "
        "have its variance; paper: its scale over the cohort size. ε is that which holds",
    )
    self_noise: bool = _setting(
        True, "whether a client adds a share of its own to those of the others"
    )


ClientLevel = Annotated[
    GaussianLevel
    | LaplaceLevel
    | StaircaseLevel
    | BoundedLaplaceLevel
    | DiscreteGaussianLevel
    | CentralDiscreteLevel
    | CorrelatedGaussianLevel
    | ObliviousLevel,
    Field(discriminator="mechanism"),
]


# The units that each choice protects.
_UNITS = {"none": (), "record": ("record",), "client": ("client",), "both": ("client", "record")}


class PrivacySection(Section):
    """The unit of privacy, its mechanisms and its accounting."""

    unit: Literal["none", "record", "client", "both"] = _setting(
        "record", "what ε protects: a record, a client with all its records, or both"
    )
    relation: Literal["zero_out", "add_remove", "replace_one"] = _setting(
        "zero_out", "neighbouring data; add_remove is refused, since sizes are public"
    )
    accountant: Literal["rdp", "pld", "rdp-classic-64"] = _setting("rdp", "how ε is computed")
    record: RecordLevel = Field(default_factory=RecordLevel, description="record-level mechanism")
    client: ClientLevel = Field(default_factory=GaussianLevel, description="client-level mechanism")

    def __init__(self, /, **values: Any) -> None:
        """Refuses to leave out a mechanism that is needed, whose defaults would hold."""
        super().__init__(**values)
        for unit in self.units:
            if unit in values and is_none(values[unit]):
                key = f"privacy.{unit}"
                rule = f"not be none under privacy.unit={self.unit}, whose mechanism it is"
                way = "for none, set privacy.unit to none"
                raise refused(key, f"{key} must {rule}; {way}, got 'none'")

    @property
    def units(self) -> tuple[str, ...]:
        """The units that are protected."""
        return _UNITS[self.unit]

    @property
    def promise(self) -> dict[str, str]:
        """The accountant and the relation of every ε."""
        return {"accountant": self.accountant, "relation": self.relation}


class ExecutionSection(Section):
    """Speed and memory; results do not depend on it."""

    clients_per_chunk: Count | Literal["auto", "tuned"] = _setting(
        "auto", "clients that are vmapped together"
    )
    devices: Count | Literal["auto"] = _setting(
        "auto", "devices that share a cohort; a CPU's cores"
    )
    model_devices: Count = _setting(
        1, "devices that train clients together, each with a part of the frozen parameters"
    )
    model_rules: dict[str, Index] = _table(
        "axis along which frozen parameters are divided, from 0, by path or pattern, such as "
        '{"params/*/dense_in/kernel" = 1}; the first that matches counts'
    )
    placement: Literal["auto", "device", "host", "disk"] = _setting(
        "auto",
        "where examples and client state are kept; disk: client state in a file of the run folder, "
        "which takes space only for clients that took part",
    )
    split_clients: bool = _setting(
        False,
        "train a client with more steps than the mean load of a device on all devices, each with a "
        "share of every batch",
    )
    products: Literal["exact", "split", "auto"] = _setting(
        "exact",
        "products of gradients of records: exact in float32, split into three of bfloat16 on GPUs "
        "and TPUs, or auto: split where that is faster by measured speeds",
    )
    measured: PathText | None = _setting(
        None,
        "file of speeds of this device, which auto follows; `fedjax-dp measure` writes it",
    )
    debug: bool = _setting(
        False,
        "look into rounds: one client at a time on one device; an error names the first client, "
        "local step and array that is not finite",
    )
    compilation_cache: PathText | None = _setting(
        "auto", "folder of compiled programs and tuned layouts; auto is the user's cache"
    )
    coordinator: str | None = _setting(
        None,
        "several processes that share one run: address and port of the first, such as "
        "10.0.0.1:4567, or auto if JAX finds them, as under Slurm",
    )
    num_processes: Count | None = _setting(
        None, "number of processes, if the coordinator is an address"
    )
    process_id: Index | None = _setting(None, "index of this process, from 0")


class CommunicationSection(Section):
    """Who sends what to whom, and how bytes are counted; training does not depend on it."""

    encoding: Encoding = _setting(
        "smallest",
        "how masked arrays are sent: dense, bitmap, index, the smallest of these, or values, "
        "without the positions of entries; all else is sent as it is",
    )
    serverless: bool = _setting(
        False, "without a server: each client sends its update to all others, and each sums them"
    )
    servers: list[Index] = Field(
        default_factory=list,
        description="several servers: the server of each client, numbered from 0, in turn if there "
        "are fewer entries than clients, such as [0, 1]",
    )
    exchange_every: Count | None = _setting(
        None, "rounds after which several servers continue from the mean of their models; 1 if none"
    )


class ReferencesSection(OptionalSection):
    """Models of the true clusters, trained centrally without privacy, if epochs are given."""

    switch = "epochs"

    epochs: Count | None = _setting(
        None,
        "passes over the pooled data of a cluster, in batches of 32; F_acc and F_loss compare the "
        "clients' models with these, which are trained at the first evaluation",
    )
    learning_rate: Positive = _setting(0.1, "learning rate of that training")


class EvaluationSection(Section):
    """The evaluations, exact and for the experimenter unless noise is added."""

    personal: Literal["received", "after_local"] = _setting(
        "received",
        "each client's model: as received, or also after one more round of local training, "
        "which is discarded",
    )
    training: bool = _setting(False, "evaluate on the clients' training data too")
    clusters: bool = _setting(
        False,
        "compare the clients' clusters with the true ones of the partition, and report accuracies "
        "of the smallest cluster, the minority, and of the others",
    )
    references: ReferencesSection = Field(default_factory=ReferencesSection)
    noise_multiplier: Positive | None = _setting(
        None,
        "release noised_client_accuracy, the clients' mean accuracy, after each evaluation: noise "
        "standard deviation of the sum; privacy.unit = client is charged for it",
    )


class Config(Section):
    """An experiment: one section for each of its parts."""

    # Checks the parts that a configuration names, and reads their options. The catalogue of parts,
    # which imports the sections, sets it.
    _read_parts: ClassVar[Callable[["Config"], None]] = lambda config: None

    run: RunSection = Field(default_factory=RunSection)
    data: DataSection = Field(default_factory=DataSection)
    model: ModelSection = Field(default_factory=ModelSection)
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    acceleration: AccelerationSection = Field(default_factory=AccelerationSection)
    leaving: LeavingSection = Field(default_factory=LeavingSection)
    clock: ClockSection = Field(default_factory=ClockSection)
    asynchronous: AsynchronousSection = Field(default_factory=AsynchronousSection)
    training: TrainingSection = Field(default_factory=TrainingSection)
    participation: ParticipationSection = Field(default_factory=FullParticipation)
    secure_aggregation: SecureAggregationSection = Field(default_factory=SecureAggregationSection)
    privacy: PrivacySection = Field(default_factory=PrivacySection)
    execution: ExecutionSection = Field(default_factory=ExecutionSection)
    communication: CommunicationSection = Field(default_factory=CommunicationSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    schedules: Options = _table(
        "curves over rounds by the key of the number that they multiply: a name, such as "
        'schedules.training.learning_rate = "cosine", or a table of curve, warm_up (rounds) and '
        "options; `run --keys schedules.curve=NAME`"
    )

    def __init__(self, /, **values: Any) -> None:
        """Checks values, and the parts that they name, as those of a file."""
        super().__init__(**values)
        self._read_parts()

    def without_effect(self) -> dict[str, Section]:
        """Finds the sections that are switched off, by dotted name."""
        units = self.privacy.units
        has_clock = any(key.startswith("clock.") for key in given_in(self))
        found: dict[str, Section] = {}
        for key, section in sections_in(self):
            if isinstance(section, OptionalSection):
                is_on = not section.switch or getattr(section, section.switch) is not None
                if key.startswith("privacy."):
                    is_on = key.removeprefix("privacy.") in units
                elif key.startswith("clock"):
                    is_on = has_clock
                found |= {} if is_on else {key: section}
        return found

    @property
    def data_seed(self) -> int:
        """The seed of the draws of the data: a seed of their own, or else that of the run."""
        return self.run.seed if self.data.seed is None else self.data.seed

    @property
    def title(self) -> str:
        """The name of the run, or else that of its data: of a user's file or folder, its stem."""
        path = self.data.options.get("path")
        # Of a pattern, such as hospitals/*.csv, the last part without a mark.
        parts = pathlib.PurePath(path).parts if isinstance(path, str) else ()
        stem = without_ending(next((p for p in reversed(parts) if not set(p) & set("*?[")), ""))
        name = re.sub(r"[^\w .,=+-]+", "-", stem).strip(" .,=+-")
        return self.run.name or name or self.data.name.rpartition(":")[2]


# The field of a whole configuration.
ROOT = FieldInfo(annotation=Config)
