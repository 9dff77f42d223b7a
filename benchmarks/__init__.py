"""Programs that measure, each with its own command; nothing of the package imports them."""
