"""May this model's KV be reused? Measured once, on the model as loaded, and remembered (``verify``)."""

from blendrag.verify.gate import HeldKV, verify
from blendrag.verify.record import Verification, remember, remembered

__all__ = ["HeldKV", "Verification", "remember", "remembered", "verify"]
