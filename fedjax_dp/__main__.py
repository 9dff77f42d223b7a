"""The command `fedjax-dp`, also as `python -m fedjax_dp`."""

import sys

from fedjax_dp.core.packages import MissingPackageError


def main() -> None:
    """Runs the command line, or says which extra has it."""
    try:
        from fedjax_dp.cli.main import main as run
    except MissingPackageError as error:
        sys.exit(f"fedjax-dp: {error}")
    run()


if __name__ == "__main__":
    main()
