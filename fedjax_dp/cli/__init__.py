"""The command line (extra `cli`)."""

from fedjax_dp.core.packages import needed_for as _needed_for

with _needed_for("the command line", "cli"):
    import rich as _rich  # noqa: F401
    import typer as _typer  # noqa: F401
