"""The configuration of an experiment: keys, types, ranges, defaults, options."""
