"""Distil a writer: a LoRA that encodes chunks so that answers over stored KV come near a full prefill's."""
