"""Studies: many images with one set of settings, resumable, on processes or a dask cluster."""
