"""Response synthesis over whole chunks, so that their stored KV can be used.

LlamaIndex joins texts and splits them again at the prompt's limit, counted by another tokenizer. A chunk
that is cut has no stored KV. Here chunks are packed whole, in order, counted by the model's tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.response_synthesizers import CompactAndRefine

from blendrag.errors import ContextOverflowError, InvalidInputError
from llama_index.llms.blendrag.base import BlendLLM

if TYPE_CHECKING:
    from llama_index.core.llms import LLM
    from llama_index.core.prompts import BasePromptTemplate
    from llama_index.core.tools.types import BaseTool

SEPARATOR = "\n\n"
#: LlamaIndex's own default.
PADDING = 5
#: Tokens kept free for the answer to refine, as in newer versions of LlamaIndex.
ANSWER_SO_FAR = 500


class BlendPromptHelper(PromptHelper):
    """Packs chunks without cutting them. For any synthesizer (``prompt_helper=``) or for ``Settings``.

    Raises an error for a chunk that does not fit alone. Context window, answer tokens and tokenizer are
    those of ``llm`` unless given.

    Example:
        ```python
        engine = RetrieverQueryEngine.from_args(
            retriever, llm=llm, response_mode="tree_summarize", prompt_helper=BlendPromptHelper(llm)
        )
        ```
    """

    _blend: BlendLLM = PrivateAttr()

    def __init__(self, llm: BlendLLM, **kwargs: Any) -> None:
        metadata = llm.metadata
        kwargs.setdefault("context_window", metadata.context_window)
        kwargs.setdefault("num_output", metadata.num_output)
        kwargs.setdefault("tokenizer", llm.engine.tokens.encode_text)
        super().__init__(**kwargs)
        self._blend = llm

    @classmethod
    def class_name(cls) -> str:
        return "BlendPromptHelper"

    def truncate(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = PADDING,
        llm: LLM | None = None,
        tools: list[BaseTool] | None = None,
    ) -> list[str]:
        """``text_chunks`` unchanged."""
        return list(text_chunks)

    def repack(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = PADDING,
        llm: LLM | None = None,
        tools: list[BaseTool] | None = None,
    ) -> list[str]:
        """Chunks joined, in order, to as few texts as fit into ``prompt``.

        Raises :class:`ContextOverflowError` for a chunk that does not fit alone.
        """
        most = self._room(prompt, llm)
        # packed once for several prompts, some of which hold an answer to refine
        room = most - max(padding, min(ANSWER_SO_FAR, self.context_window // 4))
        between = self._token_counter.get_string_tokens(SEPARATOR)
        packs: list[list[str]] = []
        used = 0
        for chunk in filter(None, (text.strip() for text in text_chunks)):
            tokens = self._token_counter.get_string_tokens(chunk)
            if tokens > most:
                prompt_tokens = self.context_window - self.num_output - most + tokens
                raise ContextOverflowError(prompt_tokens, self.num_output, self.context_window)
            if packs and used + between + tokens <= room:
                packs[-1].append(chunk)
                used += between + tokens
            else:
                packs.append([chunk])
                used = tokens
        return [SEPARATOR.join(pack) for pack in packs]

    def _room(self, prompt: BasePromptTemplate, llm: LLM | None) -> int:
        """Tokens left for chunks by the rendered prompt without them."""
        missing = dict.fromkeys(set(prompt.template_vars) - set(prompt.kwargs), "")
        used = self._blend.count_tokens(prompt.format_messages(llm=self._blend, **missing))
        if isinstance(llm, StructuredLLM):
            schema = json.dumps(llm.output_cls.model_json_schema())
            used += self._token_counter.get_string_tokens(schema)
        return self.context_window - self.num_output - used


class BlendSynthesizer(CompactAndRefine):
    """LlamaIndex's compact-and-refine over whole chunks.

    Example:
        ```python
        engine = RetrieverQueryEngine(retriever, response_synthesizer=BlendSynthesizer(llm))
        ```

    Raises :class:`InvalidInputError` for an ``llm`` that is not a :class:`BlendLLM`.
    """

    def __init__(self, llm: LLM | None = None, **kwargs: Any) -> None:
        from llama_index.core import Settings

        llm = Settings.llm if llm is None else llm
        model = llm.llm if isinstance(llm, StructuredLLM) else llm
        if not isinstance(model, BlendLLM):
            raise InvalidInputError(
                f"llm is a {type(model).__name__}, expected a BlendLLM, whose tokenizer counts the "
                "chunks; use CompactAndRefine with other models"
            )
        kwargs.setdefault("prompt_helper", BlendPromptHelper(model))
        super().__init__(llm=llm, **kwargs)
