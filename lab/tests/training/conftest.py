"""The shipped tokenizer, for all tests of training."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from blendrag.demo import demo_model_path


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(demo_model_path())
