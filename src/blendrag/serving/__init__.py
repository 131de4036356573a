"""Many requests at once over one model: the scheduler, joint decode steps, shared chunks."""
