"""Detections against annotations, in the panel *Review detections*."""
