"""The only room that converts between napari layers and our data."""
