"""What loading and computing take on one machine, and what follows for a prompt (CacheBlend §5.1).

Pure arithmetic over a :class:`Profile` of measured figures: no tensors, no files, no clocks. ``curve``
and ``profile`` hold the figures, ``pipeline`` the times of a prefill whose loads overlap its compute,
``parts`` what the stored parts of a prompt add up to, ``forecast`` one prompt's times, ``choice`` ratio,
schedule and what to compute instead of loading, ``storage`` the paper's question which device to buy.
"""

from blendrag.estimates.choice import Choice, Wish, choose
from blendrag.estimates.curve import Curve
from blendrag.estimates.forecast import Forecast, Prompt, forecast
from blendrag.estimates.parts import Part
from blendrag.estimates.profile import Conditions, Profile, Tier

__all__ = [
    "Choice",
    "Conditions",
    "Curve",
    "Forecast",
    "Part",
    "Profile",
    "Prompt",
    "Tier",
    "Wish",
    "choose",
    "forecast",
]
