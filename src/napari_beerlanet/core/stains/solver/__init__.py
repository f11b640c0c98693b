"""Numerics of the decomposition: kernels, unrolled and converged solver, model selection."""

MAX_COMPONENTS = 64
"""No image of three colour channels has more; time and memory grow with them."""
