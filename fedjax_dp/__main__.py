"""The command `fedjax-dp`, also as `python -m fedjax_dp`."""

import gc
import sys

from fedjax_dp.core import terminal
from fedjax_dp.core.packages import MissingPackageError


def main() -> None:
    """Runs the command line, or says which extra has it."""
    terminal.prepare()
    # Imports and traces make many objects that stay. Python would search them for cycles after
    # every 700, which takes a tenth of a short run.
    gc.set_threshold(50_000, 20, 50)
    try:
        from fedjax_dp.cli.main import main as run

        run()
    except MissingPackageError as error:
        sys.exit(f"fedjax-dp: {error}")
    # An import that is interrupted may end in any error.
    except (Exception, KeyboardInterrupt):
        if not terminal.is_interrupted():
            raise
        print("error: interrupted", file=sys.stderr)
        terminal.leave(130)
    except SystemExit:
        if terminal.is_interrupted():
            terminal.leave(130)
        raise


if __name__ == "__main__":
    main()
