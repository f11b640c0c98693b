"""The panel *Stain decomposition*."""
