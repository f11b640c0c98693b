"""Qt plumbing without layers: tasks, progress, panels, controls, the session."""
