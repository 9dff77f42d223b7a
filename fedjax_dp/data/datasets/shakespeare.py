"""Shakespeare by role: the next character of what a role says."""

import pathlib
import re
from collections.abc import Iterable
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge

from fedjax_dp.core import checks, files
from fedjax_dp.core.ranges import Count, ProperFraction
from fedjax_dp.data.datasets.base import Dataset
from fedjax_dp.data.datasets.catalog import Located, locate
from fedjax_dp.data.datasets.formats import hdf5_clients, read_bytes

# The 80 characters of LEAF's Shakespeare task (Caldas et al. 2018), in its order.
VOCABULARY = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"

IGNORE_LABEL = -1

_SPACE = VOCABULARY.index(" ")
# A role is a separate line after an empty one, and ends in a colon.
_HEADING = re.compile(r"(?:\A|(?<=\n\n))([^\n]+):\n")

# For each role, in order of appearance: its name and its training and test speeches.
Roles = Iterable[tuple[str, list[str], list[str]]]


def load(
    data_dir: pathlib.Path,
    *,
    sequence_length: Count = 80,
    test_fraction: ProperFraction = 0.2,
    min_speeches: Annotated[int, Ge(2)] = 2,
    source: Literal["plays", "hdf5"] | None = None,
) -> Dataset:
    """Loads Shakespeare's plays with the roles as natural clients.

    A role's speeches are joined by line breaks. In the plays, the last speeches of a role are for
    testing, as in LEAF; the HDF5 copy has its own split. Each part is cut into windows that follow
    one another: `x` holds characters, `y` the character after each. The last window is padded with
    line breaks in `x` and -1 in `y`, which marks ignored positions. Characters are numbered by
    their position in `VOCABULARY`; any other becomes a space.

    Args:
      sequence_length: characters in a window.
      test_fraction: the share of a role's speeches for testing, in (0, 1); at least one
        speech is for training and one for testing.
      min_speeches: roles with fewer speeches are left out; at least 2.
      source: "plays" or "hdf5"; None takes the first that exists.

    Returns:
      Inputs and targets `[n, sequence_length]`, int32, with the role (`play|ROLE`) as client id.
    """
    _check(test_fraction, min_speeches)
    located = locate("shakespeare", data_dir, source)
    if located.source.name == "plays":
        path = located.paths["plays_by_role.jsonl.gz"]
        roles = _split(_read_plays(path), test_fraction, min_speeches)
    else:
        path = located.paths["shakespeare_train.h5"]
        roles = _read_hdf5(located, min_speeches)
    return _dataset("shakespeare", roles, sequence_length, located.source.name, path)


def load_tiny(
    data_dir: pathlib.Path,
    *,
    sequence_length: Count = 80,
    test_fraction: ProperFraction = 0.2,
    min_speeches: Annotated[int, Ge(2)] = 2,
) -> Dataset:
    """Loads the one-megabyte extract "tiny Shakespeare" with the roles as natural clients.

    Windows, numbering and parts are those of `load`. Roles of the same name in different plays
    (First Citizen, Messenger) are one client, since the extract does not name the plays. Headings
    with nothing said below them are left out.

    Args:
      sequence_length: characters in a window.
      test_fraction: the share of a role's speeches for testing, in (0, 1).
      min_speeches: roles with fewer speeches are left out; at least 2.

    Returns:
      Inputs and targets `[n, sequence_length]`, int32, with the role as client id.
    """
    _check(test_fraction, min_speeches)
    located = locate("tiny_shakespeare", data_dir)
    path = located.paths["input.txt"]
    ahead, *parts = _HEADING.split(files.read_text(path))
    checks.require(
        not ahead.strip(), files.at_line(path, 1), "name a role and end in a colon", ahead[:40]
    )
    speeches: dict[str, list[str]] = {}
    for role, speech in zip(parts[::2], parts[1::2], strict=True):
        if speech.strip():
            speeches.setdefault(role, []).append(speech.strip("\n"))
    roles = _split(speeches, test_fraction, min_speeches)
    return _dataset("tiny_shakespeare", roles, sequence_length, located.source.name, path)


def encode_text(text: str) -> np.ndarray:
    """Encodes characters by their position in `VOCABULARY`, others as the space; int32."""
    table = np.full(256, _SPACE, dtype=np.int32)
    table[np.frombuffer(VOCABULARY.encode("ascii"), np.uint8)] = np.arange(len(VOCABULARY))
    return table[np.frombuffer(text.encode("latin-1", errors="replace"), np.uint8)]


def windows(tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts tokens into windows of inputs (padded with 0) and next tokens (padded with -1)."""
    num_targets = max(len(tokens) - 1, 0)
    num_windows = -(-num_targets // length)
    x = np.zeros(num_windows * length, dtype=np.int32)
    y = np.full(num_windows * length, IGNORE_LABEL, dtype=np.int32)
    x[:num_targets] = tokens[:num_targets]
    y[:num_targets] = tokens[1:]
    return x.reshape(-1, length), y.reshape(-1, length)


def _check(test_fraction: float, min_speeches: int) -> None:
    checks.require(0 < test_fraction < 1, "test_fraction", "be in (0, 1)", test_fraction)
    checks.whole("min_speeches", min_speeches, at_least=2)


def _split(speeches: dict[str, list[str]], test_fraction: float, min_speeches: int) -> Roles:
    for name, texts in speeches.items():
        if len(texts) >= min_speeches:
            num_test = min(max(round(len(texts) * test_fraction), 1), len(texts) - 1)
            yield name, texts[:-num_test], texts[-num_test:]


def _read_plays(path: pathlib.Path) -> dict[str, list[str]]:
    speeches: dict[str, list[str]] = {}
    for number, line in files.lines(files.as_text(read_bytes(path), path)):
        place = files.at_line(path, number)
        row = files.parse_json(line, place)
        is_row = isinstance(row, dict) and row.keys() >= {"client", "speeches"}
        checks.require(is_row, place, "be an object with `client` and `speeches`", row)
        client, texts = row["client"], row["speeches"]
        is_named = isinstance(client, str) and client not in speeches
        checks.require(is_named, place, "name in `client` a role that no other line names", client)
        are_texts = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
        checks.require(are_texts, place, "hold a list of strings in `speeches`", texts)
        speeches[client] = texts
    return speeches


def _read_hdf5(located: Located, min_speeches: int) -> Roles:
    parts: list[dict[str, list[str]]] = []
    for name in ("shakespeare_train.h5", "shakespeare_test.h5"):
        path, roles = located.paths[name], {}
        for role, arrays in hdf5_clients(path, "snippets"):
            texts = arrays["snippets"].tolist()
            are_texts = isinstance(texts, list) and all(isinstance(t, bytes) for t in texts)
            place = f"{path}, role {role!r},"
            checks.require(are_texts, place, "hold strings in `snippets`", arrays["snippets"].dtype)
            roles[role] = [files.as_text(text, place) for text in texts]
        parts.append(roles)
    train, test = parts
    for role, texts in train.items():
        if len(texts) + len(test.get(role, ())) >= min_speeches:
            yield role, texts, test.get(role, [])


def _dataset(
    name: str, roles: Roles, sequence_length: int, origin: str, path: pathlib.Path
) -> Dataset:
    checks.whole("sequence_length", sequence_length)
    inputs: tuple[list, list] = ([], [])
    targets: tuple[list, list] = ([], [])
    clients: tuple[list, list] = ([], [])
    for role, *parts in roles:
        for part, texts in enumerate(parts):
            x, y = windows(encode_text("\n".join(texts)), sequence_length)
            inputs[part].append(x)
            targets[part].append(y)
            clients[part].append(np.full(len(x), role))
    checks.require(
        bool(inputs[0]), str(path), "hold a role with min_speeches or more speeches", "none"
    )
    return Dataset(
        name,
        {"x": np.concatenate(inputs[0]), "y": np.concatenate(targets[0])},
        {"x": np.concatenate(inputs[1]), "y": np.concatenate(targets[1])},
        num_classes=len(VOCABULARY),
        task="next_token",
        train_clients=np.concatenate(clients[0]),
        test_clients=np.concatenate(clients[1]),
        class_names=tuple(VOCABULARY),
        origin=origin,
    )
