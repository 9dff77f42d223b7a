"""The folder of a run: where things lie in it, and which one a run may have."""

import pathlib

from fedjax_dp.experiment.values import ConfigError

CONFIG_FILE, CHECKPOINT_FOLDER = "config.toml", "checkpoint"


def require_free(output: pathlib.Path) -> None:
    """Requires that a folder asked for holds nothing yet.

    Args:
      output: the folder.

    Raises:
      ConfigError: if it is a file or holds something.
    """
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise ConfigError(
            f"--output {str(output)!r} must be a new or an empty folder; "
            "to go on with a run use --resume"
        )


def next_folder(name: str) -> pathlib.Path:
    """Makes the next free folder under `runs/`; runs that start together get one each.

    Args:
      name: of the run.

    Returns:
      The folder, empty.
    """
    number = 1
    while True:
        folder = pathlib.Path("runs") / f"{name}-{number:03d}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder
