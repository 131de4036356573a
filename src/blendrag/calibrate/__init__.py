"""Which schedule suits a model: measured offline on a sample of the user's own corpus."""

from blendrag.calibrate.record import Calibration, fitting, nearest, recall, remember, resolve
from blendrag.calibrate.search import Found, Step, Tried, families, search

__all__ = [
    "Calibration",
    "Found",
    "Step",
    "Tried",
    "families",
    "fitting",
    "nearest",
    "recall",
    "remember",
    "resolve",
    "search",
]
