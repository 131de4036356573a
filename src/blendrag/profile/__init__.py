"""Measuring a model on this machine, once, and remembering it (``blendrag profile``).

``model_times`` runs the model through the fusor, ``tier_times`` reads through the store (``page_cache``: is
what is to be read cold?), ``measure`` puts both together, ``record`` keeps the result beside the gate's
verdict and knows what it holds for. What the figures mean, and what follows from them, is
:mod:`blendrag.estimates`.
"""

from blendrag.profile.measure import Measure, Watch
from blendrag.profile.record import UNREADABLE, conditions_of, differing, recall, remember

__all__ = [
    "UNREADABLE",
    "Measure",
    "Watch",
    "conditions_of",
    "differing",
    "recall",
    "remember",
]
