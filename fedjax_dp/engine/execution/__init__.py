"""How rounds are executed: compilation, layout, placement, memory. Speed, never results."""
