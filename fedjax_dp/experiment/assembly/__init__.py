"""From a configuration to data, model, algorithm and simulation."""
