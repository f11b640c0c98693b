"""The benchmark: the paper's table, every method against every other, on the user's own data."""
