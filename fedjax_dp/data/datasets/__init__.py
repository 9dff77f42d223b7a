"""Public data sets by name: load them, list those on this computer, fetch the others."""

from fedjax_dp.data.datasets.base import Dataset, within_norm
from fedjax_dp.data.datasets.catalog import MissingDataError, resolve_data_dir
from fedjax_dp.data.datasets.registry import (
    LOADERS,
    DatasetStatus,
    FetchError,
    available,
    fetch,
    info,
    load,
    loader,
    options,
    status,
)
from fedjax_dp.data.datasets.stores import save

__all__ = [
    "LOADERS",
    "Dataset",
    "DatasetStatus",
    "FetchError",
    "MissingDataError",
    "available",
    "fetch",
    "info",
    "load",
    "loader",
    "options",
    "resolve_data_dir",
    "save",
    "status",
    "within_norm",
]
