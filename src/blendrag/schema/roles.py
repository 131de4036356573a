"""What a model's chat template writes around the roles of a schema (Prompt Cache §3.2.3).

Found by rendering short conversations. A template that folds the system text into the user's message, or
begins with a default one, is followed as it is.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache

from blendrag.errors import InvalidInputError
from blendrag.model.bounded_templates import bounded
from blendrag.model.tokens import Tokens
from blendrag.schema.nodes import Node, Role, Union, children_of

_BEFORE: dict[str | None, tuple[str, ...]] = {
    None: (),
    "system": ("system",),
    "user": ("user",),
    "assistant": ("user", "assistant"),
}
"""A conversation that ends with that role."""


class ChatTexts:
    """The template's texts of one model. They are marked, so that other text never becomes control tokens."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        word = secrets.token_hex(8)
        self._begin, self._end = f"\ue0f0{word}\ue0f2", f"\ue0f1{word}\ue0f2"
        self._marked = re.compile(f"{self._begin}(.*?){self._end}", re.DOTALL)
        self.around = lru_cache(maxsize=64)(self._around)
        self.ids = lru_cache(maxsize=1 << 16)(self._ids)

    def writes_bos(self, role: str) -> bool:
        """Whether a conversation that begins with ``role`` begins with BOS."""
        bos = self._tokens.tokenizer.bos_token
        return bool(bos) and self.around(role, None)[0].startswith(bos)

    def between(
        self, nodes: Iterable[Node], previous: str | None, has_bos: bool
    ) -> Callable[[Role], tuple[str, str]]:
        """For :func:`with_role_texts`: the texts of the roles in ``nodes``, after the role ``previous``.

        Each member of a union follows what is before the union. ``has_bos``: BOS is written already.
        """
        texts: dict[Role, tuple[str, str]] = {}

        def follow(nodes: Iterable[Node], previous: str | None) -> str | None:
            for node in nodes:
                if isinstance(node, Role):
                    before, after = self.around(node.role, previous)
                    if has_bos and previous is None and self.writes_bos(node.role):
                        before = before.removeprefix(self._tokens.tokenizer.bos_token)
                    texts[node] = self._mark(before), self._mark(after)
                    previous = node.role
                elif isinstance(node, Union):
                    previous = [follow([member], previous) for member in node.members][-1]
                else:
                    previous = follow(children_of(node), previous)
            return previous

        follow(nodes, previous)
        return texts.__getitem__

    @bounded()  # both renderings see the same moment
    def opening(self, previous: str) -> str:
        """What the template writes before an answer that follows the role ``previous``."""
        conversation = [_message(role, "x") for role in _BEFORE[previous]]
        with suppress(Exception):  # jinja errors of many types
            plain = self._tokens.render(conversation, add_generation_prompt=False)
            opened = self._tokens.render(conversation)
            if opened.startswith(plain):
                return self._mark(opened[len(plain) :])
        return ""

    def _ids(self, text: str) -> tuple[int, ...]:
        """Token ids of a text with marked texts of the template in it; all other text is plain."""
        ids: list[int] = []
        for i, part in enumerate(self._marked.split(text)):
            if part and i % 2:  # no tokenizer may put a space before it, as before a whole prompt
                ids += self._tokens.encode_prompt(part, begins=False).ids
            elif part:
                ids += self._tokens.encode_text(part)
        return tuple(ids)

    def plain(self, text: str) -> str:
        """A text without the marks."""
        return self._marked.sub(r"\1", text)

    def _mark(self, text: str) -> str:
        return f"{self._begin}{text}{self._end}" if text else ""

    @bounded()
    def _around(self, role: str, previous: str | None) -> tuple[str, str]:
        """What the template writes before and after a message of ``role``."""
        if not self._tokens.has_template:
            raise InvalidInputError(
                f"<{role}> in a schema for a model whose tokenizer has no chat template; leave the tag out, "
                "or set tokenizer.chat_template"
            )
        while (word := secrets.token_hex(8)) in self._tokens.template_text:
            pass
        content, earlier = f"x{word}x", f"y{word}y"
        ways = [(_BEFORE[previous], ()), (_BEFORE[previous], ("user",))]
        ways += [
            (_BEFORE["assistant" if role == "user" else "user"], ()),
            ((), ()),
            ((), ("user",)),
        ]
        for before, after in ways:
            messages = [_message(each, earlier) for each in before]
            messages += [_message(role, content), *(_message(each, "z") for each in after)]
            with suppress(Exception):  # jinja errors of many types, from the template's checks
                rendered = self._tokens.render(messages, add_generation_prompt=False)
                head, tail = rendered.split(content)
                return self._without(head, before, earlier), "" if after else tail
        raise InvalidInputError(
            f"the chat template refuses a message of role {role}; leave out <{role}>"
        )

    def _without(self, head: str, before: Sequence[str], earlier: str) -> str:
        """``head`` without the messages before, as far as they are written without this one, too."""
        if not before:
            return head
        with suppress(Exception):  # a template may refuse them alone, or leave out a system text
            alone = self._tokens.render(
                [_message(each, earlier) for each in before], add_generation_prompt=False
            )
            if earlier in alone and head.startswith(alone):
                return head[len(alone) :]
        return head[head.rindex(earlier) + len(earlier) :]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
