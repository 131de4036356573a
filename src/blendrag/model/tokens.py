"""Two tokenizers for two kinds of text: the template's own, and text that must stay text.

A document may contain ``<|im_end|>``; it must never become the control token. Chunk text therefore
goes through a second instance without added tokens that encodes special tokens as plain text. The
flag lives in state shared with every user of a tokenizer, so the first instance is never touched.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from blendrag.errors import InvalidInputError, ModelLoadError
from blendrag.identity import digest_fields

_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "blendrag_probe",
        "description": "none",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}


class Tokens:
    """Encodes template and chunk text of one model."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ModelLoadError(
                f"{type(tokenizer).__name__} is a slow tokenizer without exact offsets; "
                "load the model with its fast tokenizer (use_fast=True)"
            )
        self.tokenizer = tokenizer
        self.text = plain_text_tokenizer(tokenizer.backend_tokenizer)
        added = tokenizer.added_tokens_decoder
        special = {index: str(token) for index, token in added.items() if token.special}
        self._special_ids = frozenset((*tokenizer.all_special_ids, *special))
        self._special_texts = sorted({*tokenizer.all_special_tokens, *special.values()})
        self._tools_shown: tuple[str, bool] | None = None

    def encode_template(self, text: str) -> list[int]:
        """Ids of rendered template text: control tokens count, nothing is added."""
        if not text:
            return []
        # too long a prompt is told by its own error, so no warning of the tokenizer comes before it
        return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def encode_text(self, text: str) -> list[int]:
        """Ids of document text: whatever looks like a control token stays text."""
        ids = self.text.encode(text, add_special_tokens=False).ids
        if self._special_ids.isdisjoint(ids):
            return ids
        return self._encode_broken_up(text)

    def _encode_broken_up(self, text: str) -> list[int]:
        # Some vocabularies (Unigram) hold control tokens as ordinary pieces; a piece cannot match
        # across a cut, so each look-alike is cut after its first character.
        cuts = sorted(
            start + 1 for special in self._special_texts for start in _occurrences(text, special)
        )
        ids: list[int] = []
        for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
            ids += self.text.encode(text[a:b], add_special_tokens=False).ids
        if not self._special_ids.isdisjoint(ids):
            raise InvalidInputError(
                f"text {text[:40]!r}… encodes to control tokens of this tokenizer even as plain text; "
                "remove them from the document"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the fast tokenizer's whole definition, taken once.

        Without truncation and padding: any call of the tokenizer leaves those behind as it had them.
        """
        backend = self.tokenizer.backend_tokenizer
        definition = backend.to_str()
        if backend.truncation is not None or backend.padding is not None:
            plain = Tokenizer.from_str(definition)
            plain.no_truncation()
            plain.no_padding()
            definition = plain.to_str()
        return digest_fields([definition.encode()])

    @property
    def bos_id(self) -> int | None:
        return self.tokenizer.bos_token_id

    @property
    def adds_bos(self) -> bool:
        """Whether the stock tokenizer call begins every plain prompt with BOS."""
        ids = self.tokenizer.encode("a", add_special_tokens=True)
        return bool(ids) and ids[0] == self.bos_id

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def template_text(self) -> str:
        """The chat template's source; of several, all of them."""
        template = getattr(self.tokenizer, "chat_template", None) or ""
        return template if isinstance(template, str) else "\n".join(template.values())

    @property
    def special_texts(self) -> Sequence[str]:
        """How the control tokens are written."""
        return self._special_texts

    @property
    def framing_ids(self) -> frozenset[int]:
        """Control tokens that begin, end and fill, and are never part of what is said."""
        tokenizer = self.tokenizer
        ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        return frozenset(i for i in ids if i is not None)

    def special_among(self, ids: Collection[int]) -> frozenset[int]:
        """Those of ``ids`` that are control tokens."""
        return self._special_ids.intersection(ids)

    @property
    def has_tools(self) -> bool:
        """Whether the chat template shows the model the tools it is given: rendered, not read."""
        template = self.template_text
        if self._tools_shown is None or self._tools_shown[0] != template:
            self._tools_shown = (template, self._shows_tools())
        return self._tools_shown[1]

    def _shows_tools(self) -> bool:
        if not self.has_template:
            return False
        try:
            rendered = self.render([{"role": "user", "content": "a"}], tools=[_PROBE_TOOL])
        except Exception:  # jinja errors of many kinds: a template that refuses tools has none
            return False
        return str(_PROBE_TOOL["function"]["name"]) in rendered

    def render(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """Messages through the model's chat template, ready for an answer."""
        options.setdefault("add_generation_prompt", True)
        return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, **options))

    def default_prefix_ids(self) -> tuple[int, ...]:
        """What chunks are encoded behind unless told: BOS, else the template's first token."""
        if self.bos_id is not None:
            return (self.bos_id,)
        if self.has_template:
            rendered = self.render([{"role": "user", "content": "a"}])
            return tuple(self.encode_template(rendered)[:1])
        return tuple(self.encode_template("\n")[:1])


def plain_text_tokenizer(backend: Tokenizer) -> Tokenizer:
    """An independent copy of ``backend`` that knows no added tokens and adds none."""
    definition = json.loads(backend.to_str())
    definition["added_tokens"] = []
    definition["post_processor"] = None
    definition["padding"] = definition["truncation"] = None
    try:
        plain = Tokenizer.from_str(json.dumps(definition))
    except Exception:
        # A model whose unknown token exists only as an added token cannot do without the list.
        # Marked special, they are all encoded as text.
        definition["added_tokens"] = [
            {**token, "special": True} for token in json.loads(backend.to_str())["added_tokens"]
        ]
        plain = Tokenizer.from_str(json.dumps(definition))
    plain.encode_special_tokens = True
    return plain


def _occurrences(text: str, needle: str) -> list[int]:
    found, at = [], text.find(needle)
    while at >= 0:
        found.append(at)
        at = text.find(needle, at + 1)
    return found
