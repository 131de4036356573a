"""Documents and chunks as text: readers, chunking, and known chunks in a rendered prompt."""
