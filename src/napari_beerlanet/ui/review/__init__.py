"""The panel *Review detections*."""
