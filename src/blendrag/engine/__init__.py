"""The engine: one class an integration needs, and the types it takes and returns."""

from blendrag.corpus.filters import Filter
from blendrag.corpus.retriever import RetrievedChunk as Source
from blendrag.engine.answers import AnswerIterator, AsyncAnswerIterator
from blendrag.engine.calibration import CalibrationOptions, CalibrationReport
from blendrag.engine.dry_run import DryRun
from blendrag.engine.engine import BlendEngine
from blendrag.engine.ingest import IngestReport
from blendrag.engine.request import Answer, Message, Options, Prompt, SchemaPrompt, TokenLogprob
from blendrag.engine.schemas import SchemaReport
from blendrag.text.readers import Document

__all__ = [
    "Answer",
    "AnswerIterator",
    "AsyncAnswerIterator",
    "BlendEngine",
    "CalibrationOptions",
    "CalibrationReport",
    "Document",
    "DryRun",
    "Filter",
    "IngestReport",
    "Message",
    "Options",
    "Prompt",
    "SchemaPrompt",
    "SchemaReport",
    "Source",
    "TokenLogprob",
]
