"""KV that several machines share in an object store. One machine alone needs none of this."""
