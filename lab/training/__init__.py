"""How the embedded model was made: generated documents, curriculum, tokenizer, training."""
