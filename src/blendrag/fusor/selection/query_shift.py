"""``query+shift``: the tokens of ``query``, and what they show about the others (AgentKVShift).

Tokens that are not recomputed are moved by half the mean error of those of their chunk that are; see
:mod:`blendrag.fusor.shift`. Each request then has chunks of its own: while requests decode together, only
``query`` keeps chunks that they have in common in memory once.
"""

from __future__ import annotations

from blendrag.fusor.selection.query import QueryPolicy


class QueryShiftPolicy(QueryPolicy):
    name = "query+shift"
    shifts_stored = True
