"""``blendrag eval`` and ``blendrag bench``: the policy arena and the benches.

Bad input raises a :class:`~blendrag.errors.BlendragError`, which ends a command with one sentence.
"""
