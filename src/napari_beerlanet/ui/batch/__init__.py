"""The panel *Run on folder*."""
