"""Published lists of budgets and batch sizes, where a configuration names one."""

import dataclasses

from fedjax_dp.core import checks
from fedjax_dp.experiment.config import Config
from fedjax_dp.privacy.budgets import NUM_CLIENTS, published_batch_sizes, published_budgets


def with_named_lists(config: Config) -> Config:
    """Puts numbers where a configuration names a published list.

    Args:
      config: the configuration.

    Returns:
      The configuration with one budget and one batch size for each client; itself where it names
      none.

    Raises:
      ValueError: if there is no such list for the number of clients.
    """
    count = config.data.num_clients
    epsilon, batch_size = config.privacy.record.epsilon, config.training.batch_size
    for key, value in (
        ("privacy.record.epsilon", epsilon),
        ("training.batch_size", batch_size),
    ):
        if isinstance(value, str):
            rule = f"be one of {', '.join(map(str, NUM_CLIENTS))} where {key} is {value}"
            checks.require(count in NUM_CLIENTS, "data.num_clients", rule, count)
    if isinstance(epsilon, str):
        record = dataclasses.replace(
            config.privacy.record, epsilon=published_budgets(epsilon, count).tolist()
        )
        config = dataclasses.replace(
            config, privacy=dataclasses.replace(config.privacy, record=record)
        )
    if isinstance(batch_size, str):
        training = dataclasses.replace(
            config.training, batch_size=published_batch_sizes(count).tolist()
        )
        config = dataclasses.replace(config, training=training)
    return config
