"""Files that are damaged, in one of several ways."""

import pathlib

import numpy as np

KINDS = ("flip", "cut", "empty", "delete", "swap", "append", "zero")


def damage(path: pathlib.Path, kind: str, other: pathlib.Path, rng: np.random.Generator) -> None:
    """Damages a file; "swap" exchanges its content with that of another."""
    content = bytearray(path.read_bytes())
    if kind == "delete":
        path.unlink()
        return
    if kind == "swap":
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
        return
    if kind == "flip" and content:
        content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    half, zeros = content[: len(content) // 2], bytes(len(content))
    changed = {"cut": half, "empty": b"", "append": content + b"\n{}", "zero": zeros}
    path.write_bytes(changed.get(kind, content))
