"""The panel *Find cells*."""
