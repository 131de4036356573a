"""What answers are worth: datasets, metrics, and the arena in which policies meet at equal r.

Nothing here is imported by the engine; questions run through it as a user's do.
"""
