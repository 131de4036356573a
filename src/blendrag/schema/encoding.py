"""A schema for one model: the tokens of its modules at their positions, and of the prompts that use it.

Modules are encoded apart from each other (Prompt Cache §3.3). The texts outside of modules are encoded
together, as every prompt has all of them. So are the modules of a scaffold, for prompts that import them all.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from blendrag.model.tokens import Tokens
from blendrag.schema.checking import check_context, check_lengths, resolve
from blendrag.schema.concatenation import Block, CachedStretch, FixedPrompt, FreshTokens
from blendrag.schema.layout import lay_out, own_parts
from blendrag.schema.nodes import (
    Import,
    Module,
    Node,
    Parameter,
    PromptMarkup,
    Role,
    Schema,
    Text,
    children_of,
    walk,
    with_role_texts,
    without_roles,
)
from blendrag.schema.parts import CachedText, FilledParameter
from blendrag.schema.roles import ChatTexts
from blendrag.text.prompt import Segment, SegmentedPrompt

#: Shorter stretches are computed in blended prompts.
BLEND_MIN_TOKENS = 16


def _roles(nodes: Iterable[Node], imported: Collection[str] | None = None) -> list[Role]:
    """All roles in the order of the file; with ``imported``, without those of other modules."""
    found: list[Role] = []
    for node in nodes:
        if isinstance(node, Role):
            found.append(node)
        if not isinstance(node, Module) or imported is None or node.name in imported:
            found += _roles(children_of(node), imported)
    return found


def _imported(prompt: PromptMarkup) -> set[str]:
    return {node.name for node in walk(prompt.children) if isinstance(node, Import)}


@dataclass(frozen=True)
class Placeholder:
    """The token that stands for the tokens of an argument while a module is encoded."""

    id: int
    note: str = ""
    """Which token it is, if the tokenizer has no ``<unk>``."""


def placeholder_of(tokens: Tokens) -> Placeholder:
    """``<unk>``, or a space if the tokenizer has none, or has it for something else (the end of texts)."""
    unknown, named = tokens.tokenizer.unk_token_id, str(tokens.tokenizer.unk_token)
    if unknown is not None and "unk" in named.lower():
        return Placeholder(unknown)
    for text in (" ", "\n", "."):
        if ids := tokens.encode_text(text):
            why = "has no <unk>" if unknown is None else f"has {named} in place of <unk>"
            return Placeholder(ids[0], f"the tokenizer {why}; {text!r} stands for parameters")
    raise AssertionError("a tokenizer that encodes neither spaces nor dots")


@dataclass(frozen=True)
class _Tokens:
    """Tokens that are encoded together, and where each text is among them."""

    block: Block
    where: dict[Text, tuple[int, int]]


class TokenizedSchema:
    """The parts of ``schema`` as tokens of one model, at their positions."""

    def __init__(self, schema: Schema, tokens: Tokens) -> None:
        self.name = schema.name
        self.placeholder = placeholder_of(tokens)
        self._texts = ChatTexts(tokens)
        self.plain = self._texts.plain
        self._with_roles = schema.children
        roles = _roles(schema.children)
        #: BOS is in every prompt, also if the role that the template writes it for is not imported.
        has_bos = self._texts.writes_bos(roles[0].role) if roles else tokens.adds_bos
        self._first = (tokens.bos_id,) if has_bos and tokens.bos_id is not None else ()
        texts = self._texts.between(schema.children, None, bool(self._first))
        self.schema = with_role_texts(schema, texts)
        self.layout = lay_out(self.schema, self.count, len(self._first))
        self._own: dict[str, _Tokens] = {
            name: self._tokens(name, own_parts(module))
            for name, module in self.schema.modules.items()
        }

    @property
    def end(self) -> int:
        """The first position after the schema."""
        return self.layout.tokens

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All that is encoded: the text outside of modules, each module, each scaffold."""
        own = [self._anonymous, *self._own.values(), *self._scaffolds.values()]
        return tuple(each.block for each in own if each.block.stretches)

    def place(self, prompt: PromptMarkup, context_tokens: int = sys.maxsize) -> FixedPrompt:
        """The tokens of ``prompt`` at their positions, within the context. Raises :class:`SchemaError`."""
        prompt = self.as_chat(prompt)
        parts = resolve(self.schema, prompt)
        check_lengths(parts, self.count)
        extents = self.layout.place(parts, self.count)
        check_context(parts, extents, context_tokens)
        encoded_in = self._encoded_in(_imported(prompt))
        placed: list[CachedStretch | FreshTokens] = []
        if self._first and not self._begins_with_text:
            placed.append(CachedStretch(self._anonymous.block, 0, len(self._first)))
        for part, extent in zip(parts, extents, strict=True):
            if isinstance(part, CachedText):
                together = encoded_in[part.module.name] if part.module else self._anonymous
                if part.text in together.where:
                    placed.append(CachedStretch(together.block, *together.where[part.text]))
                continue
            text = part.argument.text if isinstance(part, FilledParameter) else part.text.text
            if ids := self._texts.ids(text):
                at = tuple(range(extent.start, extent.start + len(ids)))
                placed.append(FreshTokens(ids, at))
        return FixedPrompt(self.name, tuple(placed))

    def siblings(self, prompt: FixedPrompt) -> list[Block]:
        """The modules that are in a union with one of ``prompt``, and not in it."""
        blocks = {part.block for part in prompt.parts if isinstance(part, CachedStretch)}
        used = {name for name, tokens in self._own.items() if tokens.block in blocks}
        for names, tokens in self._scaffolds.items():
            if tokens.block in blocks:
                used |= names
        unions = {union: None for name in used for union, _ in self.schema.places[name].choices}
        others = [member.name for union in unions for member in union.members]
        return [self._own[name].block for name in others if name not in used]

    def segments(self, prompt: FixedPrompt) -> SegmentedPrompt:
        """``prompt`` as text with known chunks, one after another, to be blended.

        Text of the schema before the first module is not a chunk: it is where the prompt begins.
        """
        segments: list[Segment] = []
        for part in prompt.parts:
            at = segments[-1].end if segments else 0
            if (
                isinstance(part, CachedStretch)
                and len(part.ids) >= BLEND_MIN_TOKENS
                and (at or part.block is not self._anonymous.block)
            ):
                segments.append(Segment("", part.ids, at, part.block.name, part.ids))
            else:
                segments.append(Segment("", part.ids, at))
        return SegmentedPrompt(tuple(segments))

    # -- tokens ---------------------------------------------------------------------------------

    def count(self, text: str) -> int:
        return len(self._texts.ids(text))

    @property
    def _begins_with_text(self) -> bool:
        first = next(iter(without_roles(self.schema.children)), None)
        return isinstance(first, Text) and self.count(first.text) > 0

    @cached_property
    def _anonymous(self) -> _Tokens:
        texts = [node for node in without_roles(self.schema.children) if isinstance(node, Text)]
        return self._tokens(self.name, texts, self._first)

    @cached_property
    def _scaffolds(self) -> dict[frozenset[str], _Tokens]:
        """The tokens of each scaffold, by the names of its modules; the largest first."""
        found = {}
        for scaffold in sorted(self.schema.scaffolds, key=lambda each: -len(each.modules)):
            names = sorted(scaffold.modules, key=lambda name: self.layout[name].start)
            nodes = [node for name in names for node in own_parts(self.schema.modules[name])]
            nodes.sort(key=lambda node: self.layout[node].start)
            found[frozenset(names)] = self._tokens(" + ".join(names), nodes)
        return found

    def _tokens(
        self, name: str, nodes: Iterable[Text | Parameter], first: Sequence[int] = ()
    ) -> _Tokens:
        ids, positions = list(first), list(range(len(first)))
        where: dict[Text, tuple[int, int]] = {}
        stretches: list[tuple[int, int]] = []
        if first and not self._begins_with_text:
            stretches.append((0, len(first)))
        for node in nodes:
            start = len(ids)
            if isinstance(node, Parameter):
                ids += [self.placeholder.id] * node.max_tokens
            else:
                ids += self._texts.ids(node.text)
            at = self.layout[node].start
            positions += range(at, at + len(ids) - start)
            if isinstance(node, Text) and len(ids) > start:
                begins = 0 if first and start == len(first) and self._begins_with_text else start
                where[node] = begins, len(ids)
                stretches.append(where[node])
        block = Block(name, tuple(ids), tuple(positions), tuple(stretches))
        return _Tokens(block, where)

    # -- prompts --------------------------------------------------------------------------------

    def as_chat(self, prompt: PromptMarkup) -> PromptMarkup:
        """``prompt`` with its roles as texts, and the beginning of the answer after it.

        In a chat, text at its end that has no role is the user's.
        """
        roles = _roles(prompt.children)
        if not roles and not _roles(self._with_roles):
            return prompt
        before = _roles(self._with_roles, _imported(prompt))
        previous = before[-1].role if before else None
        children = list(prompt.children)
        loose: list[Node] = []
        while children and isinstance(children[-1], Text):
            loose.insert(0, children.pop())
        if any(isinstance(node, Text) and node.text.strip() for node in loose):
            children.append(Role("user", tuple(loose), loose[0].at))
        chat = PromptMarkup(prompt.schema, tuple(children), prompt.at)
        roles = _roles(chat.children)
        last = roles[-1].role if roles else previous
        opening = self._texts.opening(last) if last and last != "assistant" else ""
        texts = self._texts.between(chat.children, previous, bool(self._first))
        chat = with_role_texts(chat, texts)
        if not opening:
            return chat
        answer = Text(opening, prompt.at)
        return PromptMarkup(chat.schema, (*chat.children, answer), chat.at)

    def _encoded_in(self, imported: Collection[str]) -> dict[str, _Tokens]:
        """What holds each imported module: a complete scaffold, or the module itself."""
        found = {name: self._own[name] for name in imported}
        left = set(imported)
        for names, together in self._scaffolds.items():
            if names <= left:
                left -= names
                found |= dict.fromkeys(names, together)
        return found
