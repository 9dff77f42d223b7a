"""Settings of the points of a grid that depend on several axes, such as rates by method."""

import pathlib
from collections.abc import Sequence

from fedjax_dp.core import checks, files
from fedjax_dp.experiment.reading.config_files import require_key
from fedjax_dp.experiment.studies.sweep import Point

_OPTION = "--settings"


def with_settings(grid: Sequence[Point], file: pathlib.Path) -> tuple[list[Point], list[str]]:
    """Adds to each point the overrides of its line in a CSV file; also returns the keys.

    Columns that are named after axes tell which points a line is for; the others are keys of the
    configuration, which an empty cell leaves as they are.
    """
    files.require_file(file, _OPTION)
    numbered = [
        (files.at_line(file, number), line)
        for number, line in files.lines(files.read_text(file))
        if not line.startswith("#")
    ]
    lines = [(place, files.cells(line, place)) for place, line in numbered]
    rule = "hold a line of column names and one for each point"
    checks.require(len(lines) > 1, str(file), rule, f"{len(lines)} lines")
    place, header = lines[0]
    checks.require(len(set(header)) == len(header), place, "name each column once", header)
    axes = [name for name in header if name in grid[0].values]
    keys = [name for name in header if name not in axes]
    rule = f"name an axis, of {list(grid[0].values)}, and a key of the configuration"
    checks.require(bool(axes and keys), place, rule, header)
    for key in keys:
        require_key(key)
    settings: dict[tuple[str, ...], list[str]] = {}
    for place, cells in lines[1:]:
        checks.require(len(cells) == len(header), place, f"have {len(header)} cells", len(cells))
        line = dict(zip(header, cells, strict=True))
        values = tuple(line[axis] for axis in axes)
        checks.require(values not in settings, place, "be the only line of its points", values)
        settings[values] = [f"--{key}={line[key]}" for key in keys if line[key]]
    points = []
    for point in grid:
        values = tuple(point.values[axis] for axis in axes)
        named = ", ".join(f"{axis}={value}" for axis, value in zip(axes, values, strict=True))
        checks.require(values in settings, str(file), f"have a line for {named}", sorted(settings))
        points.append(point._replace(words=(*point.words, *settings[values])))
    return points, keys
