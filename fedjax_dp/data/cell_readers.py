"""Readers of cells that are no numbers: images, text, and names of classes."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from fedjax_dp.core import checks, disclosure, files
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.packages import needed_for
from fedjax_dp.core.ranges import Count
from fedjax_dp.data.tokenizers import Tokenizer

# The marker of a position without target, or without a token.
_NONE = -1
# Images of larger files are made to exhaust memory.
_MOST_PIXELS = 1 << 26
_LARGEST_FILE = 1 << 28
_MODES = ("L", "RGB")


class Cells(NamedTuple):
    """Neighbouring cells of a column.

    Attributes:
      values: an Arrow array, `[rows]`, without nulls.
      place: names the place of cell i, for errors.
    """

    values: Any
    place: Callable[[int], str]


# Makes named arrays `[rows, ...]` of cells; its name is that of the array which a column is for.
Reader = Callable[[str, Cells], Mapping[str, np.ndarray]]


class Pictures(NamedTuple):
    """How images become arrays of bytes, `[height, width, channels]`.

    Attributes:
      image_size: height and width; None for those of the first image, which all must have.
      image_mode: "L" for grey, one channel, or "RGB", to which others are converted; None for that
        of the first image, which all must have.
      image_fit: what becomes of images of another size: "refuse"; "resize" to the size, by the
        mean of pixels; "crop", which resizes the shorter side and cuts the middle out of the other.
    """

    image_size: Sequence[int] | None = None
    image_mode: Literal["L", "RGB"] | None = None
    image_fit: Literal["refuse", "resize", "crop"] = "refuse"


def require_pictures(rule: Pictures) -> None:
    """Requires a size where images are fitted to one."""
    size = rule.image_size
    is_size = size is None or (len(size) == 2 and all(type(n) is int and n >= 1 for n in size))
    is_size = is_size and (size is None or size[0] * size[1] <= _MOST_PIXELS)
    what = f"be a height and a width, of at most {_MOST_PIXELS} pixels together"
    checks.require(is_size, "image_size", what, size)
    rule_of_fit = f"be given, since image_fit is {rule.image_fit!r}"
    checks.require(size is not None or rule.image_fit == "refuse", "image_size", rule_of_fit, size)


def picture(content: bytes, place: str, rule: Pictures) -> np.ndarray:
    """Decodes one image; errors name its place, sizes and mode, and show no pixel."""
    with needed_for("Reading images", "images"):
        from PIL import Image, ImageOps
    bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    damage = (OSError, SyntaxError, ValueError, TypeError, LookupError, OverflowError, *bombs)
    size = None if rule.image_size is None else (rule.image_size[1], rule.image_size[0])
    is_small = len(content) <= _LARGEST_FILE
    disclosure.require(is_small, "the image", "be a file of at most 256 MiB", "more", where=place)
    with files.reading(place, "be an image", *damage):
        opened = Image.open(io.BytesIO(content))
        is_single = getattr(opened, "n_frames", 1) == 1
    # Before decoding, which could take any amount of memory if the size is damaged.
    fits = opened.size[0] * opened.size[1] <= _MOST_PIXELS
    rule_of_size = f"have at most {_MOST_PIXELS} pixels"
    disclosure.require(fits, "the image", rule_of_size, opened.size, where=place)
    if size is not None and rule.image_fit == "refuse" and opened.size != size[::-1]:
        _require_size(place, size, opened.size)
    disclosure.require(is_single, "the image", "be one image, not several", "more", where=place)
    mode = opened.mode
    can_be = mode in _MODES if rule.image_mode is None else mode not in ("I", "F", "I;16")
    can_be = can_be and not mode.startswith("I;16")
    way = "be grey or RGB of 8 bits (image_mode = 'L' or 'RGB' converts others of 8 bits)"
    disclosure.require(can_be, "the image", way, mode, where=place)
    with files.reading(place, "be an intact image", *damage):
        # As cameras mark it.
        upright = ImageOps.exif_transpose(opened)
        if rule.image_mode is not None and upright.mode != rule.image_mode:
            upright = upright.convert(rule.image_mode)
        if size is not None and rule.image_fit == "resize":
            upright = upright.resize(size, Image.Resampling.BOX)
        elif size is not None and rule.image_fit == "crop":
            upright = ImageOps.fit(upright, size, Image.Resampling.BOX)
        pixels = np.asarray(upright)
    if size is not None:
        _require_size(place, size, pixels.shape[1::-1])
    return pixels if pixels.ndim == 3 else pixels[:, :, np.newaxis]


def _require_size(place: str, size: tuple[int, int], found: Sequence[int]) -> None:
    rule, shown = f"be {size[0]}x{size[1]} pixels", f"{found[0]}x{found[1]}"
    disclosure.require(tuple(found) == size, "the image", rule, shown, where=place)


def like_first(first: np.ndarray, pixels: np.ndarray, place: str) -> None:
    """Requires an image of the size and mode of the first one."""
    shown = [f"{x.shape[1]}x{x.shape[0]} in {_MODES[x.shape[2] // 3]}" for x in (first, pixels)]
    rule = f"be of {shown[0]} like the first (or give image_size with image_fit, and image_mode)"
    alike = pixels.shape == first.shape
    public = "be of one size and mode"
    disclosure.require(alike, "the image", rule, shown[1], where=place, public=public)


@checked
def images(rule: Pictures = Pictures()) -> Reader:
    """Reads images: files such as PNG and JPEG in binary cells, or in those of Hugging Face.

    Args:
      rule: sizes and colours.

    Returns:
      A reader of arrays `[rows, height, width, channels]`, uint8. An image of several frames, of
      16 bits, in a file elsewhere, or above 2^26 pixels is refused.

    Raises:
      ValueError: if images are fitted to no size.
    """
    require_pictures(rule)
    first: list[np.ndarray] = []

    def read(name: str, cells: Cells) -> Mapping[str, np.ndarray]:
        import pyarrow as pa

        values = cells.values
        if pa.types.is_struct(values.type):
            has_bytes = values.type.get_field_index("bytes") >= 0
            _require_kind(cells, has_bytes, "hold images, as binary cells or {bytes, path}")
            values = values.field("bytes")
        is_binary = pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)
        _require_kind(cells, is_binary, "hold images, as binary cells or {bytes, path}")
        made = []
        for i, content in enumerate(values):
            place = cells.place(i)
            # A path may name any file of this machine.
            rule_of_bytes = "be in the table itself, not in a file that it names"
            is_there = content.is_valid
            disclosure.require(is_there, "the image", rule_of_bytes, "no bytes", where=place)
            made.append(picture(content.as_py(), place, rule))
            first[:] = first or made
            like_first(first[0], made[-1], place)
        shape = (0, *first[0].shape) if first else (0, 1, 1, 1)
        pixels = np.stack(made) if made else np.zeros(shape, np.uint8)
        return {name: pixels}

    return read


@checked
def class_names(names: Sequence[str]) -> Reader:
    """Reads names of classes as their numbers.

    Args:
      names: the names in the order of their numbers, known without the data.

    Returns:
      A reader of arrays `[rows]`, int32; a name that is not listed is refused.

    Raises:
      ValueError: if there are fewer than two names, or one twice.
    """
    number = {name: i for i, name in enumerate(names)}
    is_list = len(number) == len(names) > 1 and all(isinstance(name, str) for name in names)
    checks.require(is_list, "classes", "be two different names or more", names)

    def read(name: str, cells: Cells) -> Mapping[str, np.ndarray]:
        texts = texts_of(cells)
        for i, text in enumerate(texts):
            if text not in number:
                rule = f"be one of {checks.shown(list(names))}"
                disclosure.require(False, "the label", rule, text, where=cells.place(i))
        return {name: np.array([number[text] for text in texts], np.int32)}

    return read


@checked
def texts(
    tokenizer: Tokenizer, sequence_length: Count, *, text_end: bool = False, is_target: bool = True
) -> Reader:
    """Reads texts as tokens; each is one example, of its first tokens.

    Args:
      tokenizer: makes the tokens, see `tokenizer`.
      sequence_length: the tokens of an example; longer texts are cut, shorter ones filled up.
      text_end: whether the tokenizer's end follows each text.
      is_target: whether the next token is the target; else the tokens alone are read.

    Returns:
      A reader of the arrays "x", `[rows, sequence_length]`, int32, filled by 0, and "y", the next
      tokens, -1 after the last; or of the tokens alone, under the name of the array, filled by -1.
      A text without a token, or without a next one, is refused.

    Raises:
      ValueError: if the tokenizer has no end that could follow.
    """
    end = tokenizer.special.end
    rule = f"be False, since {tokenizer.name} names no end of a text"
    checks.require(end is not None or not text_end, "text_end", rule, text_end)
    most = sequence_length + is_target

    def read(name: str, cells: Cells) -> Mapping[str, np.ndarray]:
        found = tokenizer.encode(texts_of(cells), cells.place)
        tokens = np.full((len(found), most), _NONE, np.int32)
        for i, ids in enumerate(found):
            ids = np.append(ids, np.int32(end or 0))[:most] if text_end else ids[:most]
            least = 1 + is_target
            enough = len(ids) >= least
            what = f"have {least} tokens or more; leave the row out, or give text_end"
            disclosure.require(enough, "the text", what, len(ids), where=cells.place(i))
            tokens[i, : len(ids)] = ids
        if not is_target:
            return {name: tokens}
        x, y = tokens[:, :-1], tokens[:, 1:]
        # As all language models here have it: what has no target is masked out of the loss.
        return {"x": np.where(y == _NONE, 0, x), "y": y}

    return read


def texts_of(cells: Cells) -> list[str]:
    """Returns the strings of cells."""
    import pyarrow as pa

    kind = cells.values.type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    _require_kind(cells, is_text, "hold text")
    return cells.values.to_pylist()


def _require_kind(cells: Cells, fits: bool, rule: str) -> None:
    where = cells.place(0) if len(cells.values) else ""
    disclosure.require(fits, "the column", rule, str(cells.values.type), where=where)


def declared_classes(schema: Any, column: str) -> tuple[str, ...]:
    """Returns the names of classes that the features of a Hugging Face table declare, or none."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        found = features[column]["names"] if features[column]["_type"] == "ClassLabel" else ()
    except (KeyError, TypeError, ValueError, RecursionError):
        return ()
    is_list = isinstance(found, list) and all(isinstance(name, str) for name in found)
    return tuple(found) if is_list and len(set(found)) == len(found) else ()
