"""Classification of crops: network, crops of boxes, `Classifier`."""
