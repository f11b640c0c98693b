"""The panel *Fine-tune*."""
