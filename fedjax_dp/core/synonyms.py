"""Words of other packages, by the names that have their meaning here."""

import difflib
import re
from collections.abc import Iterable

# Words that are less alike, from 0 to 1, are not misspellings of each other.
_ALIKE = 0.6
_SHORT = 3
_ROUNDS = "iterations communication_rounds comm_rounds central_num_iterations"
_RATE = "lr eta step_size learning_rate client_lr local_lr client_learning_rate local_learning_rate"
_SHARE = "fraction rate sampling_rate sample_rate participation_rate client_rate q"
_COHORT = "clients_per_round train_cohort_size cohort fraction_fit fraction_train client_fraction"
_NOISE = "z noise noise_scale noise_multiplier sigma"
_BUDGET = "eps epsilon target_epsilon budget"
_DELTA = "delta dp_delta target_delta"
_CLIP = "clip clipping max_grad_norm l2_norm_clip clipping_norm clipping_bound clipping_threshold"
# By name: a key or its last parts, a value, a command or one of its options. A word may have
# several meanings; those that a place does not know are left out.
WORDS: dict[str, str] = {
    # Keys.
    "run.rounds": f"num_rounds global_rounds num_server_rounds {_ROUNDS}",
    "run.evaluate_every": "eval_every evaluation_frequency",
    "run.checkpoint_every": "save_every checkpoint_frequency",
    "run.seed": "random_seed random_state rng",
    "run.secret": "secure_mode secure_rng",
    "run.callbacks": "callback patience wandb mlflow tensorboard logger loggers",
    "data.name": "dataset dataset_name",
    "data.data_dir": "data_path data_root root",
    "data.options.path": "csv csv_path csv_file data_file file filename",
    "data.options.label": "label labels target label_column target_column",
    "data.seed": "partition_seed split_seed",
    "data.max_examples": "max_samples max_train_samples num_samples subset",
    "data.num_clients": "clients n_clients num_users num_partitions num_supernodes "
    "min_available_clients",
    "data.client_test_share": "fraction_evaluate test_size test_fraction val_fraction",
    "data.partition": "partitioner split",
    "data.partition_options.alpha": "alpha dirichlet_alpha concentration",
    "model.name": "arch architecture net network",
    "model.pretrained": "checkpoint weights",
    "model.adapters.rank": "lora_r lora_rank",
    "model.adapters.alpha": "lora_alpha",
    "model.adapters.targets": "target_modules",
    "algorithm.name": "strategy method algo aggregation server_optimizer central_optimizer",
    "algorithm.options.mu": "mu prox_mu proximal_mu",
    "algorithm.options.server_learning_rate": "server_lr global_lr",
    "training.learning_rate": _RATE,
    "training.num_epochs": "epochs epoch local_epochs client_epochs local_num_epochs "
    "client_epochs_per_round",
    "training.num_steps": "steps local_steps max_steps",
    "training.batch_size": "bs local_batch_size train_batch_size client_batch_size "
    "expected_batch_size sample_rate",
    "training.micro_batch_size": "microbatch physical_batch_size max_physical_batch_size",
    "training.optimizer": "optim client_optimizer",
    "training.optimizer_options.momentum": "momentum",
    "training.optimizer_options.weight_decay": "weight_decay",
    "schedules.training.learning_rate": "scheduler lr_schedule lr_scheduler",
    "participation.cohort_size": f"{_COHORT} {_SHARE} min_fit_clients num_clients_per_round",
    "participation.sampler": "client_sampler client_sampling",
    "secure_aggregation.form": "secagg secure_agg",
    "privacy.unit": "dp differential_privacy",
    "privacy.client.mechanism": "central_privacy_mechanism",
    "privacy.relation": "neighboring_relation adjacency",
    **{f"{unit}.noise_multiplier": _NOISE for unit in ("record", "client")},
    **{f"{unit}.epsilon": _BUDGET for unit in ("record", "client")},
    **{f"{unit}.dp_delta": _DELTA for unit in ("record", "client")},
    **{f"{unit}.clip_norm": _CLIP for unit in ("record", "client")},
    "execution.devices": "device num_gpus gpus gpu cuda",
    "execution.compilation_cache": "cache_dir",
    # Values.
    "iid": "homogeneous",
    "dirichlet": "non_iid dir lda",
    "shards": "pathological",
    "fashion_mnist": "fmnist",
    "femnist": "federated_emnist",
    "cifar10": "cifar",
    "table": "csv pandas dataframe",
    "parquet": "hf huggingface datasets",
    "logistic_regression": "linear logistic softmax_regression",
    "fedavg_cnn": "cnn",
    "resnet18": "resnet",
    "lenet5": "lenet",
    "char_lstm": "lstm rnn",
    "char_transformer": "transformer",
    "mlp": "dnn fully_connected",
    "fedavg": "fedsgd federated_averaging",
    "dp_fedavg": "fedavg_dp dp_fed_avg central_dp",
    "fedadam": "fedopt",
    "afl": "agnostic agnostic_fed_avg",
    "ifca": "hyp_cluster",
    "q_ffl": "qfedavg",
    "local_only": "local",
    "centralized": "central centralised pooled",
    "weighted_mean": "mean average",
    "trimmed_mean": "median krum fed_trimmed_avg",
    "auc": "auroc roc_auc",
    "calibration_error": "ece",
    "mse": "rmse",
    "mcc": "matthews matthews_corrcoef",
    "cosine": "cosine_annealing",
    "steps": "step multi_step",
    "none": "off no false disabled",
    "client": "user participant user_level client_level",
    "record": "local example sample record_level example_level",
    "fixed_size": "uniform random without_replacement",
    "poisson": "bernoulli poisson_sampling",
    "full_participation": "all full",
    "full_batch": "all full",
    "gaussian": "normal",
    "correlated_gaussian": "dp_ftrl matrix_factorization banded_matrix_factorization dp_mf",
    "discrete_gaussian": "ddgauss distributed_discrete_gaussian",
    "pld": "prv",
    "rdp": "renyi moments",
    "replace_one": "replace substitute",
    "host": "cpu ram",
    "device": "gpu tpu",
    # Commands and their options.
    "run": "train fit start simulate",
    "evaluate": "eval test",
    "sweep": "tune grid search",
    "predict": "infer inference",
    "privacy": "accountant accounting",
    "data": "datasets",
    "delta": "dp_delta target_delta",
    "output": "out output_dir log_dir save_dir",
}


def _flat(word: str) -> str:
    return re.sub(r"[-_ .]", "", word).casefold()


_NAMES: dict[str, list[str]] = {}
for _name, _words in WORDS.items():
    for _word in _words.split():
        _NAMES.setdefault(_flat(_word), []).append(_name)


def names_of(word: str) -> list[str]:
    """Lists the names that have the meaning of a word, or else of the last part of a key."""
    return _NAMES.get(_flat(word)) or _NAMES.get(_flat(word.rpartition(".")[2]), [])


def meant(word: str, choices: Iterable[str]) -> list[str]:
    """Lists the choices that have a word's meaning, or its letters but for case, "-" and "_"."""
    known = list(choices)
    if same := [each for each in known if _flat(each) == _flat(word)]:
        return same[:1]
    section, dot, last = word.rpartition(".")
    found = [each for name in names_of(word) for each in known if _is_part(each, name)]
    found = found or [each for each in known if _flat(each.rpartition(".")[2]) == _flat(last)]
    if not dot:
        return found
    inside = [each for each in found if each.startswith(f"{section}.")]
    return inside or difflib.get_close_matches(word, found, 1, 0)


def nearest(word: str, choices: Iterable[str]) -> list[str]:
    """Lists the choices with a word's meaning, or else the one that is spelled much like it."""
    known = list(choices)
    if found := meant(word, known):
        return found
    last = word.rpartition(".")[2].casefold()
    alike: list[tuple[float, str]] = []
    for each in known:
        is_in = word.startswith(f"{each}.")
        of_last = 1.0 if is_in else _likeness(last, each.rpartition(".")[2].casefold())
        if of_last > _ALIKE:
            alike.append((of_last + _ratio(word, each), each))
    return [max(alike)[1]] if alike else []


def suggestion(word: str, choices: Iterable[str]) -> str:
    """Returns the end of an error, "; did you mean 'NAME'?", or nothing if no choice is alike."""
    found = nearest(word, choices)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def _likeness(one: str, other: str) -> float:
    """How alike two words are, from 0 to 1; of a short one a letter may differ."""
    if len(one) == len(other) <= _SHORT and sum(map(str.__ne__, one, other)) == 1:
        return 1.0
    parts = [other, *(part for part in other.split("_") if len(part) > _SHORT)]
    return max(_ratio(one, part) for part in parts)


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _is_part(choice: str, name: str) -> bool:
    """Whether a choice is a name, ends with it, or is its end."""
    return f".{choice}".endswith(f".{name}") or name.endswith(f".{choice}")
