"""Serves the functions of a file to checks in another process; needs NumPy and no other package.

`python serve.py FILE.py` runs FILE and answers requests on its input: eight bytes of length, little
endian, then an npz file with the name of a function and its arguments. What FILE prints while it is
imported goes to the error stream; what its functions print is left out.
"""

import io
import os
import runpy
import sys
from typing import IO, Any

import numpy as np

# The longest message, in bytes.
LONGEST = 2**31
# The request that is answered once the file has been imported; no function has this name.
STARTED = "is it started?"


def write(stream: IO[bytes], arrays: dict[str, Any]) -> None:
    """Writes a message."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    stream.write(buffer.tell().to_bytes(8, "little") + buffer.getvalue())
    stream.flush()


def read(stream: IO[bytes]) -> dict[str, Any] | None:
    """Reads a message; None at the end."""
    head = stream.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8:
        return None
    if length > LONGEST:
        raise ValueError(f"a message has {length} bytes, more than {LONGEST}")
    body = stream.read(length)
    if len(body) < length:
        return None
    with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
        return dict(arrays)


def packed(value: Any) -> dict[str, Any]:
    """Writes what a function returned: one array, or a sequence of arrays."""
    is_one = not isinstance(value, (tuple, list))
    arrays = [np.asarray(each) for each in ([value] if is_one else value)]
    if any(array.dtype.kind == "O" for array in arrays):
        raise TypeError(f"it returns {type(value).__name__}, not an array of numbers")
    if is_one:
        return {"value": arrays[0]}
    return {f"part{i}": array for i, array in enumerate(arrays)} | {"parts": len(arrays)}


def unpacked(arrays: dict[str, Any]) -> Any:
    """Reads what `packed` wrote."""
    if "parts" not in arrays:
        return arrays["value"]
    return [arrays[f"part{i}"] for i in range(int(arrays["parts"]))]


def main(path: str) -> None:
    """Answers until the input ends."""
    # Both streams are for messages alone, whatever the file or its libraries read and print.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        functions = {STARTED: lambda: True} | runpy.run_path(path)
    except (Exception, SystemExit) as error:
        read(requests)
        write(answers, {"error": f"{type(error).__name__}: {error}"})
        return
    while (request := read(requests)) is not None:
        # Thousands of calls print the same.
        if str(request["name"]) != STARTED:
            sys.stdout.flush()
            os.dup2(nowhere, 1)
        try:
            arguments = [request[f"argument{i}"] for i in range(int(request["arguments"]))]
            # Scalars arrive as arrays without axes.
            arguments = [a if a.ndim else a.item() for a in arguments]
            answer = packed(functions[str(request["name"])](*arguments))
        except (Exception, SystemExit) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        write(answers, answer)


if __name__ == "__main__":
    main(sys.argv[1])
