"""Stain decomposition under the Beer–Lambert law, from distinct colours to whole slides."""
