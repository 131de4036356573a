"""Many requests at once over one model: turns, joint decode steps."""
