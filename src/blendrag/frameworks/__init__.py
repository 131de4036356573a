"""What the LangChain and LlamaIndex packages share: engines by name, fields, streaming, tools."""
