"""Files that cannot be read: errors that name them."""

import contextlib
import json
import lzma
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator

# What readers raise for content that is cut off, harmed or of another kind.
_DAMAGE: tuple[type[Exception], ...] = (
    EOFError,
    OSError,
    NotImplementedError,
    UnicodeDecodeError,
    json.JSONDecodeError,
    lzma.LZMAError,
    struct.error,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
)


@contextlib.contextmanager
def damage_named(
    name: str | os.PathLike[str], kind: str = "file", *also: type[Exception]
) -> Iterator[None]:
    """Names the file that a reader could not make sense of.

    Args:
      name: the file, or the member of an archive.
      kind: what it should be, such as "gzip file".
      *also: what else the reader raises for content that it cannot read.

    Yields:
      Nothing; what is read within is named.

    Raises:
      ValueError: with name and reason, for content that the reader does not take; an error of the
        system that names its file is passed on.
    """
    try:
        yield
    except (*_DAMAGE, *also) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise ValueError(
            f"{name} must be a whole {kind}, got one that cannot be read: {error}"
        ) from error
