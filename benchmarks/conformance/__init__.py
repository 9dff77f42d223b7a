"""Other packages, each in its own environment, under the conformance checks."""
