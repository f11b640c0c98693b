"""The panel "Run benchmark"."""
