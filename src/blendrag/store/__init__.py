"""The KV store: chunk key → that chunk's KV cache, exactly the bytes that were put, or a miss."""
