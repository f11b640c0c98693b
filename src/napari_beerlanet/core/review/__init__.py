"""Review of detections: filters, order, decisions and how they are saved."""
