"""The panel *Classify cells*."""
