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
    privacy, count = config.privacy, config.data.num_clients
    record = _budgets(privacy.record, count)
    training = _batch_sizes(config.training, count)
    if record is privacy.record and training is config.training:
        return config
    privacy = privacy.model_copy(update={"record": record})
    return config.model_copy(update={"privacy": privacy, "training": training})


def _budgets(section: RecordLevel, count: int) -> RecordLevel:
    name = section.epsilon
    if not isinstance(name, str):
        return section
    _require_list("privacy.record.epsilon", name, count)
    return section.model_copy(update={"epsilon": published_budgets(name, count).tolist()})


def _batch_sizes(section: TrainingSection, count: int) -> TrainingSection:
    name = section.batch_size
    if not isinstance(name, str):
        return section
    _require_list("training.batch_size", name, count)
    return section.model_copy(update={"batch_size": published_batch_sizes(count).tolist()})


def _require_list(key: str, name: str, count: int) -> None:
    rule = f"be one of {', '.join(map(str, NUM_CLIENTS))} if {key} is {name}"
    checks.require(count in NUM_CLIENTS, "data.num_clients", rule, count)
