"""The components that a configuration names, and the options of each."""
