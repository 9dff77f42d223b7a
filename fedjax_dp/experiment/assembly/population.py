"""From a named data set to the clients' training and held-out data."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from fedjax_dp.core import checks, disclosure
from fedjax_dp.core.registry import is_own
from fedjax_dp.data import arrays, datasets, disk_arrays, partition, statistics
from fedjax_dp.data.datasets.registry import option_naming_clients
from fedjax_dp.data.datasets.table import LARGE_INPUT
from fedjax_dp.data.federated import FederatedData, flat
from fedjax_dp.experiment.components.experiment import Population
from fedjax_dp.experiment.components.partitions import PARTITIONS, Facts, Spread
from fedjax_dp.experiment.components.unseen import key_of, unseen_of
from fedjax_dp.experiment.schema.config import DataSection, ModelSection
from fedjax_dp.models import registry as models
from fedjax_dp.models.losses import IGNORE_LABEL

# Purposes of the draws from a seed; those of partitions are 0 and 2, that of `unseen` is 5.
_SPLIT, _PUBLIC, _VALIDATION, _FEWER = 1, 3, 4, 6
# The most clients or columns that a note names.
_SHOWN = 5
# The option of models whose number of tokens is not that of classes.
_VOCABULARY = "vocabulary_size"
# Rows of labels that are checked at once.
_CHECKED_ROWS = 1 << 20


def build_population(
    section: DataSection, seed: int, *, needs_test_labels: bool = True
) -> Population:
    """Loads a data set and partitions it into clients, on the host."""
    data = datasets.load(section.name, section.data_dir, **section.options)
    return population_from(data, section, seed, needs_test_labels=needs_test_labels)


def population_from(
    data: datasets.Dataset, section: DataSection, seed: int, *, needs_test_labels: bool = True
) -> Population:
    """Partitions a data set into clients, on the host; predictions need no labels of test rows."""
    _check_labels(data)
    is_unlabelled = _is_unlabelled(data.test["y"])
    what, rule = f"the labels of {data.name}, test part,", "be known; only predictions need none"
    checks.require(not (is_unlabelled and needs_test_labels), what, rule, "none")
    data, left_out = _fewer(data, section.max_examples, seed)
    if section.input_norm is not None:
        data = datasets.within_norm(data, section.input_norm)
    if not section.is_divided:
        made_by = section.partition_for(data.train_clients is not None)
        section = section.model_copy(update={"partition": made_by})
    entry = PARTITIONS[section.partition]
    unseen: FederatedData | None = None
    is_natural = not (entry.counts_clients or entry.changes_examples)
    has_names = is_natural and data.train_clients is not None
    if has_names:
        data, unseen = _without_natural(data, section, seed)
    data, public_x = _hold_out_public(data, section.public_examples, seed)
    is_labelled = data.task == "classification" and data.train["y"].ndim == 1
    rule = f"be false for {data.name}, whose labels are not classes of examples"
    fits = is_labelled or not section.stratified
    checks.require(fits, "data.stratified", rule, section.stratified)
    is_asked = "client_test_share" in section.model_fields_set and section.client_test_share > 0
    rule = f"be 0 for {section.partition}, which decides itself what clients hold out"
    fits = not (is_asked and entry.changes_examples)
    checks.require(fits, "data.client_test_share", rule, section.client_test_share)
    chosen: dict[str, Any] = {"partition": section.partition}
    made = entry.make(Facts(data, section.num_clients, seed), section.partition_options)
    if not entry.changes_examples:
        made = _checked_rows(made, len(data.train["y"]))
    else:
        chosen["client_test_share"] = 0.0
        made = _checked_spread(section.partition, made, len(data.train["y"]))
    num_made = made.train.num_clients if entry.changes_examples else len(made)
    rule = f"make the {section.num_clients} clients of data.num_clients"
    fits = not entry.counts_clients or num_made == section.num_clients
    checks.require(fits, f"the partition {section.partition}", rule, num_made)
    test: FederatedData | None = None
    validation: FederatedData | None = None
    sharing = statistics.Sharing()
    client_test: FederatedData | None
    own_test: FederatedData | None = None
    share = 0.0
    clusters: np.ndarray | None = None
    names: tuple[str, ...] = ()
    is_of_clients = False
    if not has_names:
        apart = unseen_of(section, list(map(str, range(num_made))), seed)
        if len(apart):
            rest = np.delete(np.arange(num_made), apart)
            made, unseen = _without(data, made, apart, rest, key_of(section))
            # They keep their numbers.
            names = _numbered(rest)
    if isinstance(made, Spread):
        train, validation, client_test = made.train, made.validation, made.client_test
        clusters = made.clusters
        sharing = statistics.sharing_of(made.rows)
        test = None if client_test is not None else _whole_test(data, is_unlabelled)
    else:
        if has_names:
            ids = np.unique(np.asarray(data.train_clients)).tolist()
            names = tuple(data.client_names[i] if data.client_names else str(i) for i in ids)
            tests = data.test_clients
            is_of_clients = tests is not None and bool(np.isin(tests, ids).any())
            if not (is_unlabelled or is_asked):
                own_test = _own_test(data, ids, names)
        share = section.client_test_share if own_test is None else 0.0
        train, client_test = _split(data, made, names, share, seed, stratified=section.stratified)
        if own_test is not None:
            client_test, chosen["client_test_share"] = own_test, share
        test = _whole_test(data, is_unlabelled)
    is_drawn = share > 0 or section.client_validation_share > 0
    rule = "be false where no share of each client's examples is held out"
    checks.require(is_drawn or not section.stratified, "data.stratified", rule, section.stratified)
    if section.client_validation_share > 0:
        rule = f"be 0 for {section.partition}, which makes its own validation part"
        share = section.client_validation_share
        checks.require(validation is None, "data.client_validation_share", rule, share)
        train, validation = _validated(train, share, seed, stratified=section.stratified)
    if section.check_finite:
        for part in (train, client_test, test, validation, unseen):
            if part is not None:
                part.check_finite()
    return Population(
        train,
        client_test,
        test,
        public_x,
        data.num_classes,
        is_labelled,
        validation,
        data.exact_statistics,
        (*left_out[:is_natural], *_notes(data, train, own_test, section)),
        sharing,
        tuple(data.class_names),
        tuple(data.feature_names),
        chosen=chosen,
        clusters=clusters,
        unseen=unseen,
        encoding=data.encoding,
        is_test_of_clients=is_of_clients,
    )


def require_vocabulary(section: ModelSection, population: Population) -> None:
    """Requires tokens of inputs within the vocabulary of a model with an option for its size."""
    if is_own(section.name) or _VOCABULARY not in models.options(section.name):
        return
    size = (models.options(section.name) | section.options)[_VOCABULARY]
    fields = ("train", "client_test", "test", "validation", "unseen")
    parts = [part for name in fields if (part := getattr(population, name)) is not None]
    inputs = [part.examples["x"] for part in parts if "x" in part.examples]
    inputs += [] if population.public_x is None else [population.public_x]
    whole = [array for array in inputs if array.dtype.kind in "iu"]
    blocks = itertools.chain.from_iterable(map(disk_arrays.parts, whole))
    largest = max((int(np.max(block)) for block in blocks if block.size), default=0)
    rule = f"be below {size}, the option {_VOCABULARY} of {section.name}"
    disclosure.require(largest < size, "the tokens of the data", rule, largest)


def _whole_test(data: datasets.Dataset, is_unlabelled: bool) -> FederatedData | None:
    """Returns the test part of a data set as one client; None if it has none."""
    if not len(data.test["y"]):
        return None
    examples = {k: v for k, v in data.test.items() if k != "y" or not is_unlabelled}
    return FederatedData(examples, np.array([0, len(data.test["y"])]), ("test",))


def _notes(
    data: datasets.Dataset,
    train: FederatedData,
    own_test: FederatedData | None,
    section: DataSection,
) -> tuple[str, ...]:
    """Lists warnings about the data."""
    found = []
    entry = PARTITIONS[section.partition]
    named = option_naming_clients(section.name, section.options)
    is_unasked = data.train_clients is not None and "partition" not in section.model_fields_set
    if (named or is_unasked) and not {"client_ids", "pool"} & set(entry.given):
        what = f"data.options.{named} does" if named else f"the natural clients of {data.name} do"
        found.append(
            f"{what} not determine the clients: the partition "
            f"{section.partition} divides the rows among {train.num_clients} clients of its own; "
            "data.partition = 'natural' takes those of the data"
        )
    if data.exact_statistics and (section.unseen_client_share or section.unseen_clients):
        found.append(
            f"clients that never take part ({key_of(section)}) are in what was computed of all "
            f"clients: {'; '.join(data.exact_statistics)}"
        )
    if large := _large_inputs(data, section.name):
        found.append(
            f"the inputs {', '.join(large[:_SHOWN])}{', …' * (len(large) > _SHOWN)} of {data.name} "
            f"have values above {LARGE_INPUT} in magnitude, which makes training slow or "
            "unstable; data.options.scaling maps them to similar ranges"
        )
    classes = data.class_names if data.task == "classification" else ()
    for what, each in (("classes", classes), ("clients", train.client_names)):
        if alike := _alike(each):
            found.append(
                f"the {what} {' and '.join(map(repr, alike))} differ in case or spaces alone"
            )
    if untrained := _untrained(data):
        some = ", ".join(untrained[:_SHOWN]) + ", …" * (len(untrained) > _SHOWN)
        found.append(
            f"{len(untrained)} of {data.num_classes} classes have no training examples: {some}"
        )
    alone: list[int] = []
    has_test = np.ones(1, int) if own_test is None else own_test.sizes
    if section.partition == "natural" and data.task == "classification":
        alone = _alone(train, data.num_classes)
    for clients, what in (
        (np.flatnonzero(train.sizes == 0), "have no training examples"),
        (np.flatnonzero(has_test == 0), "have no test examples, and no test accuracy of their own"),
        (alone, "share no class with another client; if that is not so, write labels alike"),
    ):
        if len(clients):
            names = train.client_names or [str(i) for i in range(train.num_clients)]
            some = ", ".join(names[i] for i in clients[:_SHOWN]) + ", …" * (len(clients) > _SHOWN)
            found.append(f"{len(clients)} of {train.num_clients} clients {what}: {some}")
    if not len(data.test["y"]):
        share = 0.0 if entry.changes_examples else section.client_test_share
        found.append(
            f"{data.name} has no test set: "
            + (
                f"accuracy is measured on the {100 * share:g} % of their examples that clients "
                "hold out (data.client_test_share)"
                if share > 0
                else "no test accuracy is measured"
            )
            + (
                ""
                if share > 0 or entry.changes_examples
                else "; data.client_test_share holds out a share of each client's examples for it"
            )
        )
    return tuple(found)


def _alike(names: tuple[str, ...]) -> list[str]:
    """Lists the first names that differ in case or spaces alone."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault("".join(name.casefold().split()), []).append(name)
    return next((group for group in groups.values() if len(group) > 1), [])


def _untrained(data: datasets.Dataset) -> list[str]:
    """Lists the classes without training examples, by name or number, if there are labels."""
    labels, counts = data.train["y"], np.zeros(data.num_classes, np.int64)
    if data.task != "classification" or labels.ndim > 1:
        return []
    for _, some in _blocks(labels):
        known = some[(some >= 0) & (some < data.num_classes)].astype(np.int64)
        counts += np.bincount(known, minlength=data.num_classes)
    names = data.class_names or [str(i) for i in range(data.num_classes)]
    return [names[i] for i in np.flatnonzero(counts == 0)] if counts.any() else []


def _alone(train: FederatedData, num_classes: int) -> list[int]:
    """Lists the clients none of whose classes another client has."""
    labels, pairs = train.examples["y"], np.zeros(0, np.int64)
    if labels.ndim > 1 or np.count_nonzero(train.sizes) < 2:
        return []
    for start, some in _blocks(labels):
        rows = np.arange(start, start + len(some))
        owner = np.searchsorted(train.offsets, rows, side="right") - 1
        pairs = np.union1d(pairs, (owner * num_classes + some.astype(np.int64))[some >= 0])
    owner, label = np.divmod(pairs, num_classes)
    is_shared = np.bincount(label, minlength=num_classes)[label] > 1
    return sorted(set(owner.tolist()) - set(owner[is_shared].tolist()))


def _large_inputs(data: datasets.Dataset, name: str) -> list[str]:
    """Lists the columns of a table whose numbers were left unscaled."""
    if "scaling" not in datasets.options(name) or not data.feature_names:
        return []
    x = data.train["x"]
    numbers = x.get("numbers") if isinstance(x, dict) else x
    if numbers is None or not len(numbers):
        return []
    is_large = np.max(np.abs(numbers), axis=0) > LARGE_INPUT
    return [name for name, large in zip(data.feature_names, is_large, strict=False) if large]


def _checked_rows(clients: Any, size: int) -> list[np.ndarray]:
    """Requires that a partition assigns each example to at most one client."""
    rows = arrays.rows_of_clients("rows of the partition", clients, size)
    arrays.require_disjoint("the partition", rows)
    return rows


def _checked_spread(name: str, made: Any, size: int) -> Spread:
    """Requires a partition that changes examples to name their source records."""
    what = f"the partition {name}"
    rule = "return a Spread, which names the rows of the pool that each client has"
    checks.require(isinstance(made, Spread), what, rule, type(made).__name__)
    rows = arrays.rows_of_clients(f"rows of {what}", made.rows, size)
    sizes = made.train.sizes
    checks.require(
        len(rows) == len(sizes), f"rows of {what}", f"name {len(sizes)} clients", len(rows)
    )
    if made.clusters is not None:
        named = arrays.indices(f"clusters of {what}", made.clusters, checks.COUNT_LIMIT, "clusters")
        rule = f"name the cluster of each of {len(sizes)} clients"
        checks.require(len(named) == len(sizes), f"clusters of {what}", rule, len(named))
        made = made._replace(clusters=named)
    for i, own in enumerate(rows):
        # A record in several examples of one client would be charged for only one of them.
        rule = f"hold one row for each of the {sizes[i]} training examples of the client, each once"
        place = f"rows of {what}[{i}]"
        checks.require(len(own) == sizes[i], place, rule, f"{len(own)} rows")
        again = np.flatnonzero(np.diff(np.sort(own)) == 0)
        if len(again):
            checks.require(False, place, rule, f"row {np.sort(own)[again[0]]} twice")
    return made


def _blocks(labels: Any) -> Iterator[tuple[int, np.ndarray]]:
    """Yields parts of labels, which may be on disk, and the row where each begins."""
    for start in range(0, len(labels), _CHECKED_ROWS):
        yield start, np.asarray(labels[start : start + _CHECKED_ROWS])


def _is_unlabelled(labels: Any) -> bool:
    """Whether there are examples, and none has a label."""
    # -1 for none, or NaN where labels are numbers.
    is_missing = np.isnan if labels.dtype.kind == "f" else lambda block: block < 0
    return len(labels) > 0 and all(np.all(is_missing(block)) for _, block in _blocks(labels))


def _check_labels(data: datasets.Dataset) -> None:
    """Requires labels that are classes, or the marker for no target."""
    if data.task == "regression":
        return
    most = 1 if data.task == "multi_label" else data.num_classes - 1
    for part, labels in (("train", data.train["y"]), ("test", data.test["y"])):
        num_labelled, num_wrong, first = 0, 0, ""
        rule = f"be integers from 0 to {most}, or {IGNORE_LABEL} for none"
        what = f"the labels of {data.name}, {part} part,"
        checks.require(labels.dtype.kind in "biu", what, rule, labels.dtype)
        for start, some in _blocks(labels):
            wrong = np.flatnonzero((some < IGNORE_LABEL) | (some > most))
            if len(wrong) and not num_wrong:
                row = start + int(wrong[0] // max(1, some[0].size))
                first = f"{int(some.ravel()[wrong[0]])} in row {row}"
            num_wrong += len(wrong)
            num_labelled += int(np.count_nonzero(some >= 0))
        checks.require(not num_wrong, what, rule, f"{first}, {num_wrong} in all")
        rule = "include at least one class"
        is_known = not labels.size or num_labelled > 0 or part == "test"
        checks.require(is_known, what, rule, IGNORE_LABEL)


def _with_training(data: datasets.Dataset, rows: np.ndarray) -> datasets.Dataset:
    """Returns a data set with some of its training examples."""
    clients = None if data.train_clients is None else np.asarray(data.train_clients)[rows]
    return dataclasses.replace(data, train=_take(data.train, rows), train_clients=clients)


def _fewer(
    data: datasets.Dataset, count: int | None, seed: int
) -> tuple[datasets.Dataset, tuple[str, ...]]:
    """Draws training examples, among them those of smaller counts; notes clients without any."""
    if count is None:
        return data, ()
    size = len(data.train["y"])
    rule = f"be at most {size}, the number of training examples of {data.name}"
    checks.require(count <= size, "data.max_examples", rule, count)
    order = np.random.default_rng([seed, _FEWER]).permutation(size)
    fewer = _with_training(data, np.sort(order[:count]))
    if data.train_clients is None:
        return fewer, ()
    num_before, num_left = (len(np.unique(np.asarray(d.train_clients))) for d in (data, fewer))
    lost = num_before - num_left
    text = f"{lost} of {num_before} clients have none of the examples drawn (data.max_examples)"
    return fewer, (f"{text}, and are left out",) if lost else ()


def _hold_out_public(
    data: datasets.Dataset, count: int, seed: int
) -> tuple[datasets.Dataset, np.ndarray | None]:
    """Moves random training examples out of the pool, without labels."""
    if count == 0:
        return data, None
    size = len(data.train["y"])
    rule = f"be below {size}, the number of training examples"
    checks.require(count < size, "data.public_examples", rule, count)
    order = np.random.default_rng([seed, _PUBLIC]).permutation(size)
    rest = _with_training(data, np.sort(order[count:]))
    inputs = jax.tree.map(lambda x: np.asarray(x[order[:count]]), data.train["x"])
    return rest, inputs


def _without_natural(
    data: datasets.Dataset, section: DataSection, seed: int
) -> tuple[datasets.Dataset, FederatedData | None]:
    """Moves the natural clients that never take part out of both parts of a data set."""
    owner = np.asarray(data.train_clients)
    ids = np.unique(owner)
    names = tuple(data.client_names[i] if data.client_names else str(i) for i in ids.tolist())
    apart = unseen_of(section, names, seed)
    if not len(apart):
        return data, None
    held_out, own = ids[apart], tuple(names[i] for i in apart)
    is_apart = np.isin(owner, held_out)
    place = np.searchsorted(held_out, owner[is_apart])
    rows = [np.flatnonzero(is_apart)[each] for each in partition.by_owner(place, len(held_out))]
    parts = [FederatedData.from_indices(data.train, rows, own)]
    rest = _with_training(data, np.flatnonzero(~is_apart))
    if data.test_clients is not None and not _is_unlabelled(data.test["y"]):
        test = _own_test(data, held_out.tolist(), own)
        parts += [] if test is None else [test]
        tested = np.asarray(data.test_clients)
        kept = np.flatnonzero(~np.isin(tested, held_out))
        rest = dataclasses.replace(rest, test=_take(data.test, kept), test_clients=tested[kept])
    return rest, _joined(parts, own)


def _without(
    data: datasets.Dataset, made: Any, apart: np.ndarray, rest: np.ndarray, key: str
) -> tuple[Any, FederatedData]:
    """Moves clients that never take part out of what a partition has made."""
    names = _numbered(apart)
    if not isinstance(made, Spread):
        unseen = FederatedData.from_indices(data.train, [made[i] for i in apart], names)
        return [made[i] for i in rest], unseen
    mine, others = (np.concatenate([made.rows[i] for i in some]) for some in (apart, rest))
    num_shared = int(np.isin(mine, others).sum())
    rule = "be left out for a partition that gives a record to several clients"
    checks.require(num_shared == 0, key, rule, f"{num_shared} records of clients that train")
    parts = [part for part in (made.train, made.validation, made.client_test) if part is not None]
    unseen = _joined([part.select(apart) for part in parts], names)
    train, validation, test = (
        None if part is None else _named(part.select(rest), _numbered(rest))
        for part in (made.train, made.validation, made.client_test)
    )
    assert train is not None
    clusters = None if made.clusters is None else made.clusters[rest]
    return Spread(train, validation, test, [made.rows[i] for i in rest], clusters), unseen


def _joined(parts: list[FederatedData], names: tuple[str, ...]) -> FederatedData:
    """Joins several parts of the data of the same clients."""
    if len(parts) == 1:
        return _named(parts[0], names)
    return FederatedData.from_clients(
        [
            {
                name: np.concatenate([flat(part.client(i))[name] for part in parts])
                for name in parts[0].examples
            }
            for i in range(len(names))
        ],
        names,
    )


def _numbered(clients: np.ndarray) -> tuple[str, ...]:
    """Returns the numbers of clients as names."""
    return tuple(map(str, clients.tolist()))


def _named(data: FederatedData, names: tuple[str, ...]) -> FederatedData:
    """Names the clients of a store."""
    return dataclasses.replace(data, client_names=names)


def _take(examples: Mapping[str, Any], rows: np.ndarray) -> dict[str, Any]:
    """Takes rows of the arrays of a part, which may be on disk."""
    return {name: disk_arrays.take(array, rows) for name, array in flat(examples).items()}


def _own_test(
    data: datasets.Dataset, ids: list[Any], names: tuple[str, ...]
) -> FederatedData | None:
    """Returns the test data of natural clients, in the order of their ids; None without any."""
    if data.test_clients is None or not len(data.test_clients):
        return None
    found, index = np.unique(np.asarray(data.test_clients), return_inverse=True)
    place = {own: i for i, own in enumerate(ids)}
    owner = np.array([place.get(own, -1) for own in found.tolist()])[index]
    rows = np.flatnonzero(owner >= 0)
    if not len(rows):
        return None
    by_client = partition.by_owner(owner[rows], len(ids))
    return FederatedData.from_indices(data.test, [rows[own] for own in by_client], names)


def _split(
    data: datasets.Dataset,
    clients: list[np.ndarray],
    names: tuple[str, ...],
    share: float,
    seed: int,
    *,
    stratified: bool,
) -> tuple[FederatedData, FederatedData | None]:
    """Holds out a share of each client's examples for testing."""
    if share == 0:
        return FederatedData.from_indices(data.train, clients, names), None
    rng = np.random.default_rng([seed, _SPLIT])
    labels = np.asarray(data.train["y"]) if stratified else None
    train_rows, test_rows = partition.split_clients(
        clients, rng, test_fraction=share, labels=labels
    )
    return (
        FederatedData.from_indices(data.train, train_rows, names),
        FederatedData.from_indices(data.train, test_rows, names),
    )


def _validated(
    train: FederatedData, share: float, seed: int, *, stratified: bool
) -> tuple[FederatedData, FederatedData]:
    """Holds out a share of each client's training examples for validation."""
    rows = [np.arange(a, b) for a, b in itertools.pairwise(train.offsets)]
    rng = np.random.default_rng([seed, _VALIDATION])
    labels = np.asarray(train.examples["y"]) if stratified else None
    kept, apart = partition.split_clients(rows, rng, test_fraction=share, labels=labels)
    parts = (
        FederatedData.from_indices(train.examples, each, train.client_names)
        for each in (kept, apart)
    )
    return next(parts), next(parts)
