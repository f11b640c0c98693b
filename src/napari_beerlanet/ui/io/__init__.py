"""napari's readers and writers."""
