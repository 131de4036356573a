"""``cacheblend``: the paper's own selection, high-KV-deviation tokens by gradual filtering (CacheBlend §4.3).

It is ``hkvd`` with a schedule of its own, the one that served it best on pretrained models: each layer keeps
95% of the tokens of the layer before. ``hkvd`` takes the request's schedule.

The default is ``query+shift``, because it is closer to full prefill at the same ratio: deviation tells which
tokens are stale, but not which of them the question needs.
"""

from __future__ import annotations

from blendrag.fusor.selection.hkvd import HKVDPolicy
from blendrag.fusor.selection.schedule import Schedule


class CacheBlendPolicy(HKVDPolicy):
    name = "cacheblend"
    schedule = Schedule("geometric", growth=0.95)
