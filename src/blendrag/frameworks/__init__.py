"""What the LangChain and LlamaIndex packages share: engines by name, fields, streaming, tools."""

from blendrag.frameworks.engines import close_shared_engines, shared_engine
from blendrag.frameworks.fields import CONFIG, EngineFields, RequestFields

__all__ = ["CONFIG", "EngineFields", "RequestFields", "close_shared_engines", "shared_engine"]
