"""The panels in the viewer: they read controls, start a task and show its result; no maths."""
