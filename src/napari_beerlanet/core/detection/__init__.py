"""BeerLaNet in front of YOLO: network, tiling, scale search, inference on images and slides."""
