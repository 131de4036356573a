"""Tokenisation of one model: template text, where control tokens count, and text that must stay text.

A document may contain ``<|im_end|>``, which must never become the control token. Chunk text therefore goes
through a second tokenizer without added tokens that encodes special tokens as plain text. Its flag is state
shared by every user of a tokenizer, so the model's own instance is never changed.

A prompt may be tokenised in several pieces. SentencePiece tokenizers (Llama 2, Mistral, TinyLlama) put a
space before every text. That is right for the piece that begins the prompt only; all others go through a
copy that adds none.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import lru_cache, wraps
from itertools import pairwise, product, takewhile
from typing import Any, NamedTuple, TypeVar

from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from blendrag.errors import InvalidInputError, ModelLoadError, check_unicode, is_panic
from blendrag.model.bounded_templates import bounded, names_in
from blendrag.store.identity import digest_fields
from blendrag.text.chunking import uncapped
from blendrag.text.prompt import Encoded
from blendrag.text.spans import merged

T = TypeVar("T")

_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "blendrag_probe",
        "description": "none",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
_PROBE_TOOLS: dict[str, Any] = {"tools": [_PROBE_TOOL]}

#: What templates ask before they show tools.
_TOOLS_DEFINED = "tools is defined"


def _without_panic(encode: Callable[..., T]) -> Callable[..., T]:
    """tokenizers (0.23) panics where matching a text takes its regex too many steps: Llama 3's for ten
    million spaces. That is no :class:`Exception`, so nobody would answer the request."""

    @wraps(encode)
    def encoded(self: Tokens, text: str, *args: Any, **kwargs: Any) -> T:
        try:
            return encode(self, text, *args, **kwargs)
        except BaseException as exc:
            if not is_panic(exc):
                raise
            raise InvalidInputError(
                f"the tokenizer gives up on a text of {len(text)} characters that begins with {text[:40]!r}; "
                "shorten long runs of one character in it"
            ) from exc

    return encoded


class Tokens:
    """Encodes template and chunk text of one model."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ModelLoadError(
                f"{type(tokenizer).__name__} is a slow tokenizer without exact offsets; "
                "load the model with its fast tokenizer (use_fast=True)"
            )
        self.tokenizer = tokenizer
        written = uncapped(tokenizer.backend_tokenizer).to_str()
        definition = Definition.parse(written)
        self.fingerprint = digest_fields([written.encode()])
        """Digest of its definition, without truncation and padding, which every call may change."""
        _check_definition(tokenizer.backend_tokenizer, definition.parts)
        self.text = _plain_text_tokenizer(tokenizer.backend_tokenizer, definition)
        self._continuing = _continuing_tokenizer(definition)
        added = tokenizer.added_tokens_decoder
        self._added_ids = frozenset(added)
        self._added = {str(token): index for index, token in added.items()}
        special = {index: str(token) for index, token in added.items() if token.special}
        self._special_ids = frozenset((*tokenizer.all_special_ids, *special))
        self._markup = {text for text in self._added if _is_markup(text)}
        marked = {self._added[text] for text in self._markup} | self._special_ids
        self._never_in_text = marked - {tokenizer.unk_token_id}
        #: A normalizer may change other text into tokens that are found in normalized text.
        self._folds = _changes_text(tokenizer.backend_tokenizer) and any(
            token.normalized for token in added.values()
        )
        self.grammar_tokenizer: Any = None
        """For :mod:`blendrag.chat.grammar`, which makes it."""
        self.control_texts = special
        """The control tokens as text, by id."""
        self.special_texts = sorted({*tokenizer.all_special_tokens, *special.values()})
        """The control tokens as text."""
        # Both depend on the chat template, which its owner may replace.
        self._shows_tools = lru_cache(maxsize=1)(self._find_tools)
        self._control = lru_cache(maxsize=1)(self._find_control)
        self._without_tools = lru_cache(maxsize=1)(self._find_without_tools)
        self._turn_ends = lru_cache(maxsize=1)(self._find_turn_ends)
        self._names = lru_cache(maxsize=1)(names_in)
        self._needs_parts = lru_cache(maxsize=1)(self._find_parts)

    # -- encoding -----------------------------------------------------------------------------

    def encode_template(self, text: str) -> list[int]:
        """Ids of a rendered prompt, or of its beginning: control tokens count, nothing is added."""
        return self.encode_prompt(text).ids

    @_without_panic
    def encode_prompt(self, text: str, begins: bool = True) -> Encoded:
        """Ids and offsets of a rendered prompt or a piece of it: control tokens count, nothing is added.

        ``begins``: whether the prompt begins with this piece.
        """
        check_unicode(text, "the prompt")
        if begins or self._continuing is None:
            return self._encode_stock(text)
        encoding = self._continuing.encode(text, add_special_tokens=False)
        # After a control token some tokenizers add a space again, as the model has learned: from the first
        # control token on, the stock tokenizer decides.
        for i, index in enumerate(encoding.ids):
            if index in self._added_ids:
                at = encoding.offsets[i][0]
                rest = self._encode_stock(text[at:])
                offsets = [(low + at, high + at) for low, high in rest.offsets]
                return Encoded(encoding.ids[:i] + rest.ids, encoding.offsets[:i] + offsets)
        return Encoded(encoding.ids, encoding.offsets)

    def _encode_stock(self, text: str) -> Encoded:
        # verbose=False: a prompt that is too long has its own error
        encoding = self.tokenizer(text, add_special_tokens=False, verbose=False)[0]
        return Encoded(encoding.ids, encoding.offsets)

    @_without_panic
    def encode_text(self, text: str) -> list[int]:
        """Ids of document text: whatever looks like a control token stays text."""
        check_unicode(text, "the text")
        ids: list[int] = self.text.encode(text, add_special_tokens=False).ids
        if self._never_in_text.isdisjoint(ids):
            return ids
        # Some vocabularies (Unigram) contain control tokens as ordinary pieces. A piece cannot match across a
        # cut, so each look-alike is cut after its first character.
        cuts = sorted(
            found.start() + 1
            for each in {*self.special_texts, *self._markup}
            for found in re.finditer(f"(?={re.escape(each)})", text)
        )
        parts = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
        ids = [i for part in parts for i in self.text.encode(part, add_special_tokens=False).ids]
        if not self._never_in_text.isdisjoint(ids):
            raise InvalidInputError(
                f"text {text[:40]!r}… encodes to control tokens of this tokenizer even as plain text; "
                "remove them from the document"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """All ids as text, control tokens included."""
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(ids), **options))

    # -- control tokens -----------------------------------------------------------------------

    def control_spans(self, text: str) -> list[tuple[int, int]]:
        """Spans of ``text`` that become control tokens, ascending and disjoint.

        Control tokens are the special ones, and of the other added tokens those that the chat template writes
        (DeepSeek's are not marked special) and those in brackets (Qwen's ``<|fim_prefix|>``), but not those
        that are merely common (Gemma adds line breaks and HTML tags).
        """
        control = self._control(self.template_text)
        spans = [found.span() for found in control.pattern.finditer(text)]
        if not self._folds:
            return spans
        encoded = self._encode_stock(text)
        pairs = zip(encoded.ids, encoded.offsets, strict=True)
        return merged([*spans, *(span for index, span in pairs if index in control.ids)])

    @property
    def control_edges(self) -> frozenset[str]:
        """The characters that control tokens begin and end with, without letters and digits."""
        return self._control(self.template_text).edges

    def _find_control(self, template: str) -> _Control:
        written = {text for text in self._added if len(text.strip()) > 1 and text in template}
        markup = written | self._markup
        texts = {*self.special_texts, *markup} - {""}
        return _Control(
            re.compile(_any_of(texts) or r"(?!)"),
            self._special_ids.union(self._added[text] for text in markup),
            frozenset(c for t in texts for c in (t[0], t[-1]) if not (c.isalnum() or c.isspace())),
        )

    @property
    def bos_id(self) -> int | None:
        return self.tokenizer.bos_token_id

    @property
    def adds_bos(self) -> bool:
        """Whether the stock tokenizer begins every plain prompt with BOS."""
        ids = self.tokenizer.encode("a", add_special_tokens=True)
        return bool(ids) and ids[0] == self.bos_id

    @property
    def framing_ids(self) -> frozenset[int]:
        """Control tokens that begin, end and pad, and are never part of an answer."""
        of = self.tokenizer
        return frozenset({of.bos_token_id, of.eos_token_id, of.pad_token_id} - {None})

    @property
    def turn_ends(self) -> frozenset[int]:
        """Tokens that end an answer: the tokenizer's, and those that the chat template writes after one, or
        else before the next turn. A GGUF file may not mark them as control tokens."""
        return self._turn_ends(self.template_text)

    def _find_turn_ends(self, template: str) -> frozenset[int]:
        ends = {self.tokenizer.eos_token_id} - {None}
        said = f"x{secrets.token_hex(8)}x"
        user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": said}
        for messages, tools in product(([user, answer], [user, answer, user]), ({}, _PROBE_TOOLS)):
            after = ""
            with suppress(Exception):  # jinja errors of many kinds: a template without answers
                rendered = self.render(messages, add_generation_prompt=False, **tools)
                after = rendered.partition(said)[2]
            ids = self.encode_prompt(after.lstrip(), begins=False).ids
            if found := set(takewhile(self._added_ids.__contains__, ids)):
                # of what begins the next turn, only the first one ends this
                return frozenset(ends | (found if messages[-1] is answer else {ids[0]}))
        return frozenset(ends)

    def special_among(self, ids: Collection[int]) -> frozenset[int]:
        return self._special_ids.intersection(ids)

    # -- chat template ------------------------------------------------------------------------

    @property
    def has_template(self) -> bool:
        return bool(self.template_text)

    @property
    def names_sources(self) -> bool:
        """Whether prompts name sources. Not those of the embedded model, which was trained on others: its
        ``tokenizer_config.json`` says so."""
        return bool(self.tokenizer.init_kwargs.get("blendrag_names_sources", True))

    @property
    def template_text(self) -> str:
        """The source of the chat template, or of all of them."""
        template = getattr(self.tokenizer, "chat_template", None) or ""
        return template if isinstance(template, str) else "\n".join(template.values())

    @property
    def template_names(self) -> frozenset[str] | None:
        """Names that the chat template reads; ``None`` if it cannot be told."""
        return self._names(self.template_text)

    @property
    def has_tools(self) -> bool:
        """Whether the chat template shows tools to the model; found by rendering one."""
        return self._shows_tools(self.template_text)

    def _find_tools(self, template: str) -> bool:
        # jinja raises many kinds of errors; a template that refuses tools shows none
        with suppress(Exception):
            rendered = self.render([{"role": "user", "content": "a"}], tools=[_PROBE_TOOL])
            return _PROBE_TOOL["function"]["name"] in rendered
        return False

    def render(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """Messages through the model's chat template, ready for an answer.

        Raises what the template raises, and :class:`InvalidInputError` if it exceeds :func:`bounded`.
        """
        options.setdefault("add_generation_prompt", True)
        if not options.get("tools") and (template := self._without_tools(self.template_text)):
            options["chat_template"] = template
        if self._needs_parts(self.template_text):
            messages = [_in_parts(message) for message in messages]
        return self._render(messages, **options)

    def _render(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        with bounded():
            if any(message.get("content", "") is None for message in messages):
                return self._render_none(list(messages), **options)
            return str(
                self.tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
            )

    def _render_none(
        self, messages: list[Any], tools: Any = None, chat_template: Any = None, **options: Any
    ) -> str:
        """``apply_chat_template``, which (transformers 5.23) leaves out contents that are ``None``; DeepSeek
        R1's template writes the calls of such messages only."""
        template = self.tokenizer.get_chat_template(chat_template, tools)
        given = {**self.tokenizer.special_tokens_map, **options}
        texts = render_jinja_template([messages], tools=tools, chat_template=template, **given)[0]
        return str(texts[0])

    def _find_without_tools(self, template: str) -> str:
        """The chat template for requests without tools, if it is another; else empty.

        transformers gives it ``None`` as tools, which Phi-4 mini's iterates over, as they are defined.
        """
        if _TOOLS_DEFINED not in template or not isinstance(self.tokenizer.chat_template, str):
            return ""
        changed = template.replace(_TOOLS_DEFINED, f"({_TOOLS_DEFINED} and tools is not none)")
        for source in (template, changed):
            with suppress(Exception), bounded():
                probe = [{"role": "user", "content": "a"}]
                self.tokenizer.apply_chat_template(probe, tokenize=False, chat_template=source)
                return "" if source == template else source
        return ""

    def _find_parts(self, template: str) -> bool:
        """Whether the template shows contents only as lists of parts, as some of vision models do."""
        said, more = (f"x{secrets.token_hex(8)}x" for _ in range(2))
        parts = [{"type": "text", "text": said, "more": more}]
        with suppress(Exception):  # jinja errors of many kinds, from templates that need no parts
            if said in self._render([{"role": "user", "content": said}]):
                return False
            shown = self._render([{"role": "user", "content": parts}])
            return said in shown and more not in shown  # the text, not the list as Python writes it
        return False


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text as a list of one part."""
    if not isinstance(text := message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": text}]}


#: Largest id of a token; every id up to it is looked at.
MAX_TOKEN_ID = 1 << 22
#: Most times that a normalizer or decoder may lengthen a text.
MAX_GROWTH = 64


def _check_definition(backend: Tokenizer, definition: dict[str, Any]) -> None:
    """Raise :class:`ModelLoadError` for a tokenizer of too many ids, or whose texts have no bound."""
    if (largest := max(backend.get_vocab().values(), default=0)) > MAX_TOKEN_ID:
        raise ModelLoadError(
            f"the tokenizer has a token of id {largest}, expected at most {MAX_TOKEN_ID}; correct its "
            "tokenizer.json"
        )
    for part in ("normalizer", "decoder"):
        if (growth := _growth(definition[part])) > MAX_GROWTH:
            raise ModelLoadError(
                f"the {part} of the tokenizer makes texts {growth:.3g} times as long, expected at most "
                f"{MAX_GROWTH}; correct its tokenizer.json"
            )


def _growth(part: Any) -> float:
    """How many times as long the replacements of a part of a definition may make a text."""
    if isinstance(part, list):
        return math.prod(map(_growth, part))
    if not isinstance(part, dict):
        return 1.0
    if part.get("type") == "Replace":
        replaced = part["pattern"].get("String", "?")
        return max(1.0, len(part["content"]) / max(1, len(replaced)))
    return math.prod(_growth(each) for each in part.values() if isinstance(each, list))


class _Control(NamedTuple):
    """The control tokens of a tokenizer with its chat template."""

    pattern: re.Pattern[str]
    ids: frozenset[int]
    edges: frozenset[str]


_BRACKETED = re.compile(r"[<\[{(|｜]\S+[>\]})|｜]")
#: Tags of HTML, which are common in documents.
_HTML_TAG = re.compile(
    r"</?(a|abbr|address|article|aside|b|big|blockquote|body|br|caption|center|cite|code|col|colgroup|dd|del|div"
    r"|dl|dt|em|footer|form|h[1-6]|head|header|hr|html|i|img|ins|kbd|li|link|main|mark|meta|nav|ol|option|p|pre|q"
    r"|s|samp|section|select|small|span|strike|strong|style|sub|sup|table|tbody|td|tfoot|th|thead|title|tr|tt|u"
    r"|ul|var)/?>"
)


def _is_markup(text: str) -> bool:
    return bool(_BRACKETED.fullmatch(text)) and not _HTML_TAG.fullmatch(text)


def _any_of(texts: Collection[str]) -> str:
    """A pattern for the longest of ``texts`` at a place. It compares their common beginnings once: Gemma has
    6,000 control tokens that begin alike."""
    heads: dict[str, list[str]] = {}
    for text in filter(None, texts):
        heads.setdefault(text[0], []).append(text[1:])
    branches = [re.escape(head) + _any_of(tails) for head, tails in heads.items()]
    if "" not in texts and len(branches) == 1:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if '' in texts else ''}" if branches else ""


def _changes_text(backend: Tokenizer) -> bool:
    """Whether the normalizer changes more than spaces."""
    text = "".join(map(chr, range(33, 127))) + "＜｜É"
    normalizer = backend.normalizer
    return normalizer is not None and text not in normalizer.normalize_str(text)


class Definition(NamedTuple):
    """A tokenizer as JSON. Its vocabulary stays a text, as parsing and writing it would take long."""

    parts: dict[str, Any]
    model: str

    @staticmethod
    def parse(written: str) -> Definition:
        """The tokenizer that ``Tokenizer.to_str`` wrote, without spaces and the model last."""
        decode, parts, at = json.JSONDecoder().raw_decode, dict[str, Any](), 1
        while True:
            name, at = decode(written, at)
            if name == "model":
                return Definition(parts, written[at + 1 : -1])
            parts[name], at = decode(written, at + 1)
            at += 1

    def tokenizer(self, **changed: Any) -> Tokenizer:
        """A tokenizer whose parts are these, but for those that changed."""
        parts = json.dumps(self.parts | changed)
        return Tokenizer.from_str(f'{parts[:-1]}, "model": {self.model}}}')


_EMPTY_MODEL = '{"type": "WordLevel", "vocab": {}, "unk_token": ""}'


def _plain_text_tokenizer(backend: Tokenizer, definition: Definition) -> Tokenizer:
    """A tokenizer of this definition without added tokens, which adds neither tokens nor a leading space. It
    shares the vocabulary of ``backend``, as to read that takes long."""
    plainly = _without_additions(definition.parts) | {"added_tokens": []}
    plain = Definition(plainly, _EMPTY_MODEL).tokenizer()
    plain.model = backend.model
    plain.encode_special_tokens = True
    return plain


_WHERE_SPACES_COME_FROM = ("normalizer", "pre_tokenizer")


def _continuing_tokenizer(definition: Definition) -> Tokenizer | None:
    """A tokenizer that puts no space before a text that continues another; ``None``: ``definition`` does."""
    continuing = _without_additions(definition.parts)
    if all(continuing[part] == definition.parts[part] for part in _WHERE_SPACES_COME_FROM):
        return None
    return definition.tokenizer(**continuing)


def _without_additions(definition: dict[str, Any]) -> dict[str, Any]:
    """The definition without whatever adds or removes tokens, and without the space before a text."""
    absent = dict.fromkeys(("post_processor", "padding", "truncation"))
    spaceless = {part: _without_prefix(definition[part]) for part in _WHERE_SPACES_COME_FROM}
    return definition | absent | spaceless


def _without_prefix(part: Any) -> Any:
    """A part of a definition; ``None`` for a normalizer that only puts the space (Llama 2's ``Prepend``)."""
    if isinstance(part, list):
        return [kept for kept in map(_without_prefix, part) if kept is not None]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return None
    changed = {"prepend_scheme": "never", "add_prefix_space": False}
    return {name: changed.get(name, _without_prefix(value)) for name, value in part.items()}
