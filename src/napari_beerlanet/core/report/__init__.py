"""The HTML report on one image."""
