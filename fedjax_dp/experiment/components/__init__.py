"""The components that a configuration can name, and the options of each."""
