"""The panel "Compare normalizations"."""
