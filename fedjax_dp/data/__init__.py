"""Data of many clients: the ragged store, samplers, partitions, shifts, data sets."""

from fedjax_dp.data import augmentation, clusters, datasets, mixtures, partition, shifts, statistics
from fedjax_dp.data.cell_readers import Pictures, class_names, images, texts
from fedjax_dp.data.federated import FederatedData, example_structure
from fedjax_dp.data.participants import Participation, participation
from fedjax_dp.data.sampling import (
    Draw,
    Sampler,
    cyclic,
    fixed_size,
    full_participation,
    full_participation_first,
    min_separated,
    poisson,
    shuffled,
    without_amplification,
)
from fedjax_dp.data.tokenizers import Tokenizer, tokenizer

__all__ = [
    "Draw",
    "FederatedData",
    "Participation",
    "Pictures",
    "Sampler",
    "Tokenizer",
    "augmentation",
    "class_names",
    "clusters",
    "cyclic",
    "datasets",
    "example_structure",
    "fixed_size",
    "full_participation",
    "full_participation_first",
    "images",
    "min_separated",
    "mixtures",
    "participation",
    "partition",
    "poisson",
    "shifts",
    "shuffled",
    "statistics",
    "texts",
    "tokenizer",
    "without_amplification",
]
