"""What people see in napari: thin widgets that read controls, start work and show its result."""
