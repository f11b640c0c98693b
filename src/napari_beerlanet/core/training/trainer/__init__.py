"""Ultralytics' trainer with BeerLaNet: deterministic, resumable, with stain augmentation."""
