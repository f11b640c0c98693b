"""The science. Nothing below this package imports qtpy, napari or magicgui."""
