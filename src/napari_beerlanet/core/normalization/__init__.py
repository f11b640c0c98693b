"""Stain normalization: the colours of an image made those of a template."""
