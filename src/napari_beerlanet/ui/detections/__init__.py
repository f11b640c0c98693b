"""The detections layer: boxes in the viewer, from one to a million."""
