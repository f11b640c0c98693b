"""Checkpoints as safetensors, and the import of `.pt` files, without ever running their code."""
