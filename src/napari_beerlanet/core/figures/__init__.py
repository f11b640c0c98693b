"""Pictures of results: overlays, previews and heat maps."""
