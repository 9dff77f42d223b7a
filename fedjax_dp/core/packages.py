"""Packages that are asked for by few, and installed by those who need them."""


class MissingPackageError(ImportError):
    """A package that is not installed; its words say what needs it and how to install it."""
