"""Tokens of text: its bytes, or those of a tokenizer file of the Hugging Face format."""

import contextlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_dp.core import checks, disclosure, files
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.disclosure import GuardedError
from fedjax_dp.core.packages import needed_for

BYTES = "bytes"
# What names the special tokens of a tokenizer file, in its folder.
_CONFIG = "tokenizer_config.json"
# Ids are stored in int32.
_MOST_IDS = 1 << 30


class Special(NamedTuple):
    """The ids of special tokens; None for one that a tokenizer does not name.

    Attributes:
      begin: before a text (BOS).
      end: after a text (EOS).
      pad: fills short texts.
    """

    begin: int | None = None
    end: int | None = None
    pad: int | None = None


class Tokenizer(NamedTuple):
    """Numbers for text.

    Attributes:
      name: "bytes", or the path of the file.
      size: ids are below it; at least the largest id plus 1.
      special: ids of special tokens.
      digest: the SHA-256 of what determines the ids, in hexadecimal digits: parties with one digest
        encode alike.
      encode: `(texts, place of text i)` → an int32 array of ids for each text, with the special
        tokens that the file puts around a text; errors begin with the place and hold no text.
      decode: ids → text, without special tokens; bytes that are no UTF-8 become U+FFFD.
    """

    name: str
    size: int
    special: Special
    digest: str
    encode: Callable[[Sequence[str], Callable[[int], str]], list[np.ndarray]]
    decode: Callable[[Any], str]


@checked
def tokenizer(name: str) -> Tokenizer:
    """Chooses how text becomes tokens.

    Args:
      name: "bytes" for the bytes of UTF-8, 0 to 255, and 256, which ends a text and fills short
        ones; or the path of a `tokenizer.json` of the Hugging Face format (extra `text`). A
        `tokenizer_config.json` in its folder names its special tokens.

    Returns:
      The tokenizer. The file's own limits of length and filling up are not applied.

    Raises:
      ValueError: if the file is missing, is no tokenizer, or names a special token that it lacks.
      ImportError: if the package `tokenizers` is needed and not installed.

    Example:
      `tokenizer("bytes").decode([72, 105])`
    """
    return _of_bytes() if name == BYTES else _of_file(files.expanded(name))


def require_classes(chosen: Tokenizer, num_classes: int, what: str = "num_classes") -> None:
    """Requires a model or data set whose classes include all ids of a tokenizer."""
    rule = f"be at least {chosen.size}, the ids of the tokenizer {chosen.name}"
    checks.require(num_classes >= chosen.size, what, rule, num_classes)


def _of_bytes() -> Tokenizer:
    def encode(texts: Sequence[str], place: Callable[[int], str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def decode(ids: Any) -> str:
        kept = _ids(ids, 257)
        return kept[kept < 256].astype(np.uint8).tobytes().decode(errors="replace")

    special = Special(end=256, pad=256)
    return Tokenizer(BYTES, 257, special, _digest(b"", special), encode, decode)


def _of_file(path: pathlib.Path) -> Tokenizer:
    with needed_for(f"The tokenizer {path}", "text"):
        import tokenizers
    files.require_file(path, "tokenizer")
    content = path.read_bytes()
    with _reading(path, "be a tokenizer.json that the package tokenizers reads"):
        own = tokenizers.Tokenizer.from_str(files.as_text(content, path))
        own.no_padding()
        own.no_truncation()
        vocabulary = own.get_vocab(with_added_tokens=True)
    disclosure.require_of_file(bool(vocabulary), str(path), "hold a vocabulary", "none")
    size = max(vocabulary.values()) + 1
    disclosure.require_of_file(size <= _MOST_IDS, str(path), f"hold ids below {_MOST_IDS}", size)
    special = _special(path, vocabulary, content)

    def encode(texts: Sequence[str], place: Callable[[int], str]) -> list[np.ndarray]:
        def ids_of(i: int) -> np.ndarray:
            # An error of the package may quote the text.
            with _reading(f"{place(i)}, read by {path},", "be text that it encodes", quotes=False):
                ids = np.asarray(own.encode(texts[i]).ids, np.int64)
            # A file may put tokens around a text that its vocabulary lacks.
            rule, largest = f"give ids below {size}, its vocabulary", max(ids.tolist(), default=0)
            disclosure.require_of_file(largest < size, str(path), rule, largest)
            return ids.astype(np.int32)

        return [ids_of(i) for i in range(len(texts))]

    def decode(ids: Any) -> str:
        kept = _ids(ids, size).tolist()
        with _reading(path, "decode its own ids"):
            return own.decode(kept, skip_special_tokens=True)

    return Tokenizer(str(path), size, special, _digest(content, special), encode, decode)


def _ids(ids: Any, size: int) -> np.ndarray:
    """Requires ids of a vocabulary, `[tokens]`."""
    array = np.asarray(ids)
    is_row = array.ndim == 1 and (array.dtype.kind in "iu" or not len(array))
    checks.require(is_row, "ids", "be integers [tokens]", f"{array.dtype}{list(array.shape)}")
    wrong = array[(array < 0) | (array >= size)] if len(array) else array
    checks.require(not len(wrong), "ids", f"be in [0, {size})", wrong[:1].tolist())
    return array.astype(np.int64)


def _special(path: pathlib.Path, vocabulary: Mapping[str, int], content: bytes) -> Special:
    """Reads the special tokens that the folder of a tokenizer file names, and what it fills by."""
    beside, found = path.with_name(_CONFIG), dict[str, int | None]()
    config: Any = {}
    if files.kind_of(beside, "tokenizer") == "file":
        config = files.parse_json(files.read_text(beside), beside)
        is_object = isinstance(config, Mapping)
        disclosure.require_of_file(is_object, str(beside), "hold an object", type(config))
    for role, key in (("begin", "bos_token"), ("end", "eos_token"), ("pad", "pad_token")):
        token = config.get(key)
        # Older files describe a token by an object.
        token = token.get("content") if isinstance(token, Mapping) else token
        is_known = token is None or (isinstance(token, str) and token in vocabulary)
        rule = f"name as {key} a token of {path.name}"
        disclosure.require_of_file(is_known, str(beside), rule, token)
        found[role] = None if token is None else vocabulary[token]
    padding = json.loads(content).get("padding")
    if found["pad"] is None and padding is not None:
        found["pad"] = vocabulary.get(padding.get("pad_token"))
    return Special(**found)


@contextlib.contextmanager
def _reading(where: str | os.PathLike[str], rule: str, *, quotes: bool = True) -> Iterator[None]:
    """Turns errors of the package, which are plain exceptions and panics, into one of a file."""
    try:
        yield
    except GuardedError:
        raise
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"
        if not (is_panic or isinstance(error, Exception)):
            raise
        reason = f": {checks.shown(str(error))}" if quotes else f" ({type(error).__name__})"
        text = f"{os.fspath(where)} must {rule}{reason}"
        raise GuardedError(text, f"a file must {rule}") from None


def _digest(content: bytes, special: Special) -> str:
    """Computes the digest of what determines ids."""
    return files.digest_of([content, json.dumps(special).encode()]).hex()
