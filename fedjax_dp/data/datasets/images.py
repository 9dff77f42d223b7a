"""Image files to pixels."""

import io

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.core.packages import MissingPackageError


def pixels_of(content: bytes, place: str, size: tuple[int, int]) -> np.ndarray:
    """Decodes an image of a given width and height to uint8 `[height, width, 3]`."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingPackageError(
            "reading image files needs the package pillow: `pip install 'fedjax-dp[images]'`"
        ) from error
    damage = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
    with files.reading(place, "be an image", *damage):
        opened = Image.open(io.BytesIO(content))
    # Before decoding, which could take any amount of memory if the size is damaged.
    checks.require(opened.size == size, place, f"be {size[0]}x{size[1]} pixels", opened.size)
    with files.reading(place, "be an intact image", *damage):
        return np.asarray(opened if opened.mode == "RGB" else opened.convert("RGB"))
