"""Files → documents: text, Markdown, HTML and JSON lines. Knows no chunks, models or corpus."""

from blendrag.text.readers.document import Document, MetadataValue, digest_of
from blendrag.text.readers.formats import SUPPORTED_SUFFIXES, read_documents
from blendrag.text.readers.inputs import Inputs, find_inputs, scan_inputs

__all__ = [
    "SUPPORTED_SUFFIXES",
    "Document",
    "Inputs",
    "MetadataValue",
    "digest_of",
    "find_inputs",
    "read_documents",
    "scan_inputs",
]
