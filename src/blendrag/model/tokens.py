"""Two tokenizers for two kinds of text: the template's own, and text that must stay text.

A document may contain ``<|im_end|>``; it must never become the control token. Chunk text therefore
goes through a second instance without added tokens that encodes special tokens as plain text. The
flag lives in state shared with every user of a tokenizer, so the first instance is never touched.

A prompt may be tokenised in several pieces. Some tokenizers (SentencePiece's: Llama 2, Mistral, TinyLlama)
put a space before every text. That is right for the piece that begins the prompt and for no other, so all
others go through copies that put none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Encoding, Tokenizer

from blendrag.errors import InvalidInputError, ModelLoadError, check_unicode
from blendrag.store.identity import digest_fields
from blendrag.text.prompt import Encoded

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
        self._behind = _continuing_tokenizer(tokenizer.backend_tokenizer)
        added = tokenizer.added_tokens_decoder
        self._added_ids = frozenset(added)
        self._added_texts = {str(token) for token in added.values()}
        special = {index: str(token) for index, token in added.items() if token.special}
        self._special_ids = frozenset((*tokenizer.all_special_ids, *special))
        # what a vocabulary has no piece for controls nothing
        self._never_in_text = self._special_ids - {tokenizer.unk_token_id}
        self._special_texts = sorted({*tokenizer.all_special_tokens, *special.values()})
        self._tools_shown: tuple[str, bool] | None = None
        self._control: tuple[str, re.Pattern[str]] | None = None

    def encode_template(self, text: str) -> list[int]:
        """Ids of a rendered prompt, or of its beginning: control tokens count, nothing is added."""
        return self.encode_prompt(text).ids

    def encode_prompt(self, text: str, begins: bool = True) -> Encoded:
        """Ids and offsets of a rendered prompt, or of a piece of it: control tokens count, nothing is added.

        ``begins``: whether the prompt begins with it.
        """
        check_unicode(text, "the prompt")
        if begins or self._behind is None:
            return self._encode_stock(text)
        encoded = _encoded(self._behind.encode(text, add_special_tokens=False))
        # Behind a control token some tokenizers put a space again, and the model has learned that: from
        # the first one on it is the tokenizer's own business.
        for i, index in enumerate(encoded.ids):
            if index in self._added_ids:
                at = encoded.offsets[i][0]
                rest = self._encode_stock(text[at:])
                offsets = [(low + at, high + at) for low, high in rest.offsets]
                return Encoded(encoded.ids[:i] + rest.ids, encoded.offsets[:i] + offsets)
        return encoded

    def _encode_stock(self, text: str) -> Encoded:
        # too long a prompt is told by its own error, so no warning of the tokenizer comes before it
        return _encoded(self.tokenizer(text, add_special_tokens=False, verbose=False)[0])

    def encode_text(self, text: str) -> list[int]:
        """Ids of document text: whatever looks like a control token stays text."""
        check_unicode(text, "the text")
        ids: list[int] = self.text.encode(text, add_special_tokens=False).ids
        if self._never_in_text.isdisjoint(ids):
            return ids
        return self._encode_broken_up(text)

    def control_spans(self, text: str) -> list[tuple[int, int]]:
        """Where ``text`` has what the tokenizer makes control tokens of, ascending.

        Control tokens are the special ones, and added ones that the chat template writes (DeepSeek's are
        not marked special); not those that are merely common (Gemma adds line breaks and HTML tags).
        """
        template = self.template_text
        if self._control is None or self._control[0] != template:
            written = {t for t in self._added_texts if t.strip() and t in template}
            longest_first = sorted({*self._special_texts, *written} - {""}, key=len, reverse=True)
            pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"
            self._control = (template, re.compile(pattern))
        return [found.span() for found in self._control[1].finditer(text)]

    def _encode_broken_up(self, text: str) -> list[int]:
        # Some vocabularies (Unigram) hold control tokens as ordinary pieces; a piece cannot match
        # across a cut, so each look-alike is cut after its first character.
        cuts = sorted(
            start + 1 for special in self._special_texts for start in _occurrences(text, special)
        )
        ids: list[int] = []
        for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
            ids += self.text.encode(text[a:b], add_special_tokens=False).ids
        if not self._never_in_text.isdisjoint(ids):
            raise InvalidInputError(
                f"text {text[:40]!r}… encodes to control tokens of this tokenizer even as plain text; "
                "remove them from the document"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """All of it as text, control tokens included."""
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

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


def _encoded(encoding: Encoding) -> Encoded:
    return Encoded(encoding.ids, encoding.offsets)


def plain_text_tokenizer(backend: Tokenizer) -> Tokenizer:
    """An independent copy of ``backend`` that knows no added tokens and adds none, nor a leading space."""
    definition = _without_extras(backend)
    definition["added_tokens"] = []
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


def _continuing_tokenizer(backend: Tokenizer) -> Tokenizer | None:
    """A copy that puts no space before a text, for what stands behind another; ``None`` if it puts none."""
    stock, definition = json.loads(backend.to_str()), _without_extras(backend)
    if all(definition[part] == stock[part] for part in _WHERE_SPACES_COME_FROM):
        return None
    return Tokenizer.from_str(json.dumps(definition))


_WHERE_SPACES_COME_FROM = ("normalizer", "pre_tokenizer")


def _without_extras(backend: Tokenizer) -> dict[str, Any]:
    """Its definition, without what adds or removes tokens, and without the space before a text."""
    definition: dict[str, Any] = json.loads(backend.to_str())
    definition["post_processor"] = None
    definition["padding"] = definition["truncation"] = None
    for part in _WHERE_SPACES_COME_FROM:
        definition[part] = _without_prefix(definition[part])
    return definition


def _without_prefix(part: Any) -> Any:
    """A part of a definition; ``None`` for a normalizer that does nothing else (Llama 2's ``Prepend``)."""
    if isinstance(part, list):
        return [kept for kept in map(_without_prefix, part) if kept is not None]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return None
    changed = {"prepend_scheme": "never", "add_prefix_space": False}
    return {name: changed.get(name, _without_prefix(value)) for name, value in part.items()}


def _occurrences(text: str, needle: str) -> list[int]:
    found, at = [], text.find(needle)
    while at >= 0:
        found.append(at)
        at = text.find(needle, at + 1)
    return found
