"""Boxes and regions: geometry, matching, spatial index, detections, annotations."""
