"""``blendrag eval``, ``bench`` and ``adapt``: the policy arena, the benches, and training of writers.

Bad input raises a :class:`~blendrag.errors.BlendragError`, which ends a command with one sentence.
"""
