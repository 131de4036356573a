"""What plugs into frameworks share: engines by name, constructor fields, streams. Knows no framework."""

from blendrag.frameworks.fields import CONFIG, EngineFields, RequestFields
from blendrag.frameworks.shared import close_shared_engines, shared_engine

__all__ = ["CONFIG", "EngineFields", "RequestFields", "close_shared_engines", "shared_engine"]
