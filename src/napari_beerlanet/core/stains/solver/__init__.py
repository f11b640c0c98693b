"""Numerics of the decomposition: kernels, unrolled and converged solver, model selection."""
