"""Looking after a store: what is in it, is it sound, make room, take it elsewhere.

Works on files and index alone: needs no model, imports no torch, and may run while others use the
store. ``opening`` refuses what is no store; :mod:`blendrag.cli.store` prints what these find.
"""

from __future__ import annotations

from blendrag.store.maintenance.checking import CheckReport, NamespaceCheck, check
from blendrag.store.maintenance.exporting import ExportReport, export
from blendrag.store.maintenance.importing import ImportReport, take_in
from blendrag.store.maintenance.opening import find_namespace, require_store, require_writable
from blendrag.store.maintenance.removal import Removal, clear, collect
from blendrag.store.maintenance.survey import NamespaceStats, StoreSurvey, survey

__all__ = [
    "CheckReport",
    "ExportReport",
    "ImportReport",
    "NamespaceCheck",
    "NamespaceStats",
    "Removal",
    "StoreSurvey",
    "check",
    "clear",
    "collect",
    "export",
    "find_namespace",
    "require_store",
    "require_writable",
    "survey",
    "take_in",
]
