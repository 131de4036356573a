"""What answers are worth: datasets, metrics, and the arena in which policies meet at equal r."""
