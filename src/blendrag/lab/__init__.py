"""Benches, the policy arena, plots and pages, and training of the embedded model.

Nothing outside this package imports it. Its commands need the extra ``blendrag[lab]``.
"""
