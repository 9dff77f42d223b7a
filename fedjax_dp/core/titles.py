"""Names of methods, data sets and keys as people read them, for titles, legends and tables."""

import re
from collections.abc import Collection

_KEY = re.compile(r"[\w./:-]+")

# As their papers spell them, by the words of their keys; other words are as they are.
_SPELLINGS = {
    **{"fedavg": "FedAvg", "fedavgm": "FedAvgM", "fedadam": "FedAdam", "fedyogi": "FedYogi"},
    **{"fedadagrad": "FedAdagrad", "fedprox": "FedProx", "propfair": "PropFair", "afl": "AFL"},
    **{"term": "TERM", "q_ffl": "q-FFL", "feddyn": "FedDyn", "fedsplit": "FedSplit"},
    **{"fedpi": "FedPi", "fedrp": "FedRP", "scaffold": "SCAFFOLD", "ifca": "IFCA"},
    **{"reflected_fedavg": "reflected FedAvg", "reflected_fedprox": "reflected FedProx"},
    **{"dp_fedavg": "DP-FedAvg", "blur_lus": "BLUR + LUS", "ae_dpfl": "AE-DPFL"},
    **{"dp_sgd": "DP-SGD", "record_dp_fedavg": "DPFedAvg", "minimum_epsilon": "minimum ε"},
    **{"weiavg": "WeiAvg", "pfa": "PFA", "robust_hdp": "Robust-HDP", "r_dpcfl": "R-DPCFL"},
    **{"rc_dpfl": "RC-DPFL", "f_cdpfl": "f-CDPFL", "km_cdpfl": "KM-CDPFL", "o_dpcfl": "O-DPCFL"},
    **{"fedbn": "FedBN", "fedper": "FedPer", "fedrep": "FedRep", "lottery_fl": "LotteryFL"},
    **{"fed_ltn": "FedLTN", "mr_mtl": "MR-MTL"},
    **{"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "mnist_by_writer": "MNIST by writer"},
    **{"fedcmnist": "FedCMNIST", "fedrotmnist": "FedRotMNIST", "cifar10": "CIFAR-10"},
    **{"cifar100": "CIFAR-100", "tiny_imagenet": "Tiny ImageNet", "emnist": "EMNIST"},
    **{"femnist": "FEMNIST", "shakespeare": "Shakespeare", "stackoverflow": "Stack Overflow"},
    **{"tiny_shakespeare": "tiny Shakespeare", "flair": "FLAIR", "kddcup99": "KDD Cup 99"},
    **{"epsilon": "ε", "dp_delta": "δ", "lus": "LUS", "blur": "BLUR"},
}


def title_of(name: str) -> str:
    """Writes a name of a configuration, such as dp_sgd or learning_rate, for people.

    Of a user's own part, `module:name`, the name alone is written. Other texts stay as they are.
    """
    if not _KEY.fullmatch(name):
        return name
    own = name.rpartition(":")[2]
    return _SPELLINGS.get(own, own.replace("_", " "))


def title_of_key(key: str, others: Collection[str] = ()) -> str:
    """Writes the last part of a key, with the part before it where another key ends alike."""
    section, _, own = key.rpartition(".")
    is_shared = any(other != key and other.rpartition(".")[2] == own for other in others)
    above = section.rpartition(".")[2]
    return f"{title_of(above)} {title_of(own)}" if is_shared and above else title_of(own)
