"""Text without models: read documents, cut them into chunks, find known chunks in prompts."""
