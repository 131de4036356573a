"""Maintenance of a store: survey, check and repair, gc, clear, export and import.

Works on files and index alone: imports no torch, and is safe while other processes use the store.
"""

from __future__ import annotations

from blendrag.store.maintenance.archive import export_archive, import_archive
from blendrag.store.maintenance.integrity import CheckReport, check
from blendrag.store.maintenance.opening import find_namespace, require_store, require_writable
from blendrag.store.maintenance.space import Removal, StoreSurvey, clear, collect, survey

__all__ = [
    "CheckReport",
    "Removal",
    "StoreSurvey",
    "check",
    "clear",
    "collect",
    "export_archive",
    "find_namespace",
    "import_archive",
    "require_store",
    "require_writable",
    "survey",
]
