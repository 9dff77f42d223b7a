"""The command `python -m fedjax_dp`, which is `fedjax-dp`."""

from fedjax_dp.cli.main import main

if __name__ == "__main__":
    main()
