"""Stack Overflow: sentences of questions and answers, with their users as natural clients."""

import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.data.datasets.base import Dataset
from fedjax_dp.data.datasets.catalog import locate
from fedjax_dp.data.datasets.formats import hdf5_clients
from fedjax_dp.data.datasets.stores import Source, as_dataset, opened
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.data.store_writer import write_store

PAD, IGNORE_LABEL = 0, -1
_SPECIAL = 4


@checked
def load(
    data_dir: pathlib.Path,
    *,
    vocabulary_size: Count = 10_000,
    vocabulary: str | None = None,
    sequence_length: Count = 20,
    test_part: Literal["test", "held_out"] = "test",
    max_clients: Count | None = None,
    max_test_clients: Count | None = None,
    max_sentences: Count | None = None,
    store: str | None = None,
) -> Dataset:
    """Loads Stack Overflow for the prediction of the next word, from the HDF5 files of TFF.

    Tokens are 0 for padding, 1 to V for the words of the vocabulary, V + 1 for any other word,
    V + 2 before and V + 3 after a sentence, as in pfl-research and in TFF's task
    (Reddi et al. 2021, appendix C). A sentence with its two marks is cut to `sequence_length` + 1
    tokens: `x` are all but the last, `y` all but the first, with -1 in place of padding. Files
    are read user by user into a store on disk, which later runs open.

    Guarantee: with `vocabulary`, each example depends only on its own sentence. The published
    counts are exact statistics of the training users, which privacy statements name.

    Args:
      vocabulary_size: the number V of words.
      vocabulary: a file with a word in each line, known without the data, of which the first V are
        used; None takes the published counts, the most frequent words first.
      sequence_length: tokens of an example.
      test_part: "test", later sentences of training users; or "held_out", other users.
      max_clients: how many users are read, the first by name; None for all.
      max_test_clients: the same of the test part.
      max_sentences: how many sentences of a user are read, the first; None for all.
      store: the folder for stores; by default stackoverflow/stores in the data directory.

    Returns:
      Inputs and targets `[n, sequence_length]`, int32, memory-mapped, with the users as client ids.

    Source: format by tensorflow_federated/python/simulation/datasets/stackoverflow.py (load_data,
    load_word_counts); tokens by benchmarks/dataset/stackoverflow/download_preprocess.py of
    pfl-research.
    """
    paths = locate("stackoverflow", data_dir).paths
    words_file = paths["stackoverflow.word_count"]
    if vocabulary is not None:
        words_file = pathlib.Path(vocabulary)
        files.require_file(words_file, "vocabulary")
    vocabulary_words = _words(words_file, vocabulary_size, has_counts=vocabulary is None)
    encode = _encoder(vocabulary_words, sequence_length)
    folder = data_dir / "stackoverflow" / "stores" if store is None else pathlib.Path(store)

    def part(name: str, most: int | None) -> FederatedData:
        path = paths[f"stackoverflow_{name}.h5"]
        choices = [name, len(vocabulary_words), sequence_length, most, max_sentences]

        def write(directory: pathlib.Path) -> None:
            ids = _sizes(path, most, max_sentences)
            write_store(directory, ids, _batches(path, encode, most, max_sentences))

        return opened(folder, Source([path, words_file], choices), write)

    statistics = ("which words most of the training users wrote, the published vocabulary",)
    return as_dataset(
        "stackoverflow",
        part("train", max_clients),
        part(test_part, max_test_clients),
        num_classes=len(vocabulary_words) + _SPECIAL,
        task="next_token",
        origin="hdf5",
        exact_statistics=statistics if vocabulary is None else (),
    )


def _words(path: pathlib.Path, size: int, *, has_counts: bool) -> list[str]:
    """Reads the first words, or the most frequent of lines `word count`."""
    counts: dict[str, int] = {}
    for number, line in files.lines(files.read_text(path)):
        fields, place = line.split(), files.at_line(path, number)
        is_line = len(fields) == 1 + has_counts and (not has_counts or fields[1].isdecimal())
        rule = "hold a word and its count" if has_counts else "hold one word"
        checks.require(is_line, place, rule, line)
        checks.require(fields[0] not in counts, place, "hold a word once", fields[0])
        counts[fields[0]] = int(fields[1]) if has_counts else 0
        if not has_counts and len(counts) == size:
            break
    checks.require(len(counts) >= size, str(path), f"hold {size} words or more", len(counts))
    return sorted(counts, key=lambda word: -counts[word])[:size]


def _encoder(words: Sequence[str], length: int) -> Callable[[Sequence[str]], dict[str, np.ndarray]]:
    """Returns a function from sentences to inputs and targets."""
    number = {word: i for i, word in enumerate(words, 1)}
    unknown, begin, end = (len(words) + i for i in (1, 2, 3))

    def encode(sentences: Sequence[str]) -> dict[str, np.ndarray]:
        tokens = np.full((len(sentences), length + 1), PAD, np.int32)
        for row, sentence in zip(tokens, sentences, strict=True):
            known = [number.get(word, unknown) for word in sentence.split(" ", length)[:length]]
            marked = [begin, *known, end][: length + 1]
            row[: len(marked)] = marked
        targets = np.where(tokens[:, 1:] == PAD, np.int32(IGNORE_LABEL), tokens[:, 1:])
        return {"x": tokens[:, :-1], "y": targets}

    return encode


def _sizes(path: pathlib.Path, most: int | None, max_sentences: int | None) -> Iterator[np.ndarray]:
    """Reads the number of sentences of each user, and no sentence."""
    for user, arrays in itertools.islice(hdf5_clients(path, "tokens", read=len), most):
        size = arrays["tokens"]
        yield np.full(size if max_sentences is None else min(size, max_sentences), user)


def _batches(
    path: pathlib.Path, encode: Callable[[Any], Any], most: int | None, max_sentences: int | None
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Reads the sentences of one user after the other."""

    def read(stored: Any) -> Any:
        return stored[:max_sentences].tolist()

    for user, arrays in itertools.islice(hdf5_clients(path, "tokens", read=read), most):
        place, texts = f"{path}, user {user!r},", arrays["tokens"]
        are_texts = all(isinstance(text, bytes) for text in texts)
        checks.require(are_texts, place, "hold strings in `tokens`", texts[:1])
        yield np.full(len(texts), user), encode([files.as_text(text, place) for text in texts])
