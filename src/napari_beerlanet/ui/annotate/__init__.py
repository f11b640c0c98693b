"""The panel *Annotate*."""
