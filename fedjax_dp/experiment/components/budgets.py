"""Published lists of budgets and batch sizes that a configuration can name."""

from fedjax_dp.core import checks
from fedjax_dp.experiment.schema.config import Config, RecordLevel, TrainingSection
from fedjax_dp.privacy.accounting.budgets import (
    NUM_CLIENTS,
    published_batch_sizes,
    published_budgets,
)


def with_named_lists(config: Config) -> Config:
    """Replaces the names of published lists by their numbers, one for each client."""
    privacy, data = config.privacy, config.data
    # Natural clients are counted when the data are read.
    is_known = data.partition != "natural" or "num_clients" in data.model_fields_set
    count = data.num_clients if is_known else None
    record = _budgets(privacy.record, count)
    training = _batch_sizes(config.training, count)
    if record is privacy.record and training is config.training:
        return config
    privacy = privacy.model_copy(update={"record": record})
    return config.model_copy(update={"privacy": privacy, "training": training})


def _budgets(section: RecordLevel, count: int | None) -> RecordLevel:
    name = section.epsilon
    if not isinstance(name, str):
        return section
    found = published_budgets(name, _listed("privacy.record.epsilon", name, count))
    return section.model_copy(update={"epsilon": found.tolist()})


def _batch_sizes(section: TrainingSection, count: int | None) -> TrainingSection:
    name = section.batch_size
    if not isinstance(name, str):
        return section
    found = published_batch_sizes(_listed("training.batch_size", name, count))
    return section.model_copy(update={"batch_size": found.tolist()})


def _listed(key: str, name: str, count: int | None) -> int:
    """Requires a number of clients for which there is a published list."""
    rule = f"be one of {', '.join(map(str, NUM_CLIENTS))} if {key} is {name}"
    checks.require(count in NUM_CLIENTS, "data.num_clients", rule, count)
    assert count is not None
    return count
