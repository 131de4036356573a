"""Benches, the policy arena, plots and pages, and training of the embedded model.

Nothing outside this package imports it. Its commands need the extra ``blendrag[lab]``. Bad input raises a
:class:`~blendrag.errors.BlendragError`, which ends a command with one sentence.
"""
