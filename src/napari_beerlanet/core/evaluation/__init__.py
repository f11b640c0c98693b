"""Detections against annotations: metrics, likely label errors, differences between runs."""
