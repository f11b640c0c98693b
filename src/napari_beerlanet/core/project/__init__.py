"""A project folder: annotated images, training crops, splits, classes; changed in transactions."""
