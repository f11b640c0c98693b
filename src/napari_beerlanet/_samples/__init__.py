"""How the synthetic samples are drawn, stained and photographed."""
