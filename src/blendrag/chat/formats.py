"""The form in which a model writes reasoning and tool calls, chosen by the markup of its chat template.

A tokenizer that brings a ``response_template`` (transformers 5) knows its own form. For all others
``formats/`` holds one file for each form. Regions are those of transformers' response templates, and are
found by its :class:`~transformers.utils.chat_parsing.ResponseParser`.

Fields of a file:

* ``markup``: the form is that of a chat template that contains one of these texts.
* ``regions``: ``reasoning`` (default :data:`THINKING`), those that begin with ``tool_calls``, and
  ``unshown``, which is not part of the answer. Groups ``name`` and ``id`` of a pattern are those of the call.
* ``like``: another file whose regions are those of this form too.
* ``begun``: beginnings of a region with which a prompt may end.
* ``bare_calls``: calls also begin a line of the answer, as JSON without tags.
* ``answer_begins``: what precedes the answer, as a pattern, in forms that announce it.
* ``ends``: control tokens that end an answer, besides those that the template writes after a text.
* ``call``: the text before the name, before the arguments (as JSON) and after them, for templates that do
  not show it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import regex

if TYPE_CHECKING:
    from blendrag.model.tokens import Tokens


#: Files of ``formats/``. The first whose markup is in a template wins, so the more specific ones come first.
ORDER = (
    "harmony", "deepseek", "kimi", "kimi_k3", "command", "action", "nemotron", "functionary", "mistral",
    "gemma", "gigachat", "solar", "apriel", "tool_call_token", "call_tokens",
    "tool_call_tags", "function_tags", "bare",
)  # fmt: skip
#: Names that response templates of tokenizers give to reasoning.
REASONING_FIELDS = ("reasoning", "reasoning_content", "thinking")
#: Beginnings of the names of regions that hold calls.
CALL_FIELDS = "tool_calls"
_TAGS = (
    "think", "thinking", "thought", "reasoning", "seed:think", "longcat_think", "think:opensource",
)  # fmt: skip
#: Reasoning of forms that name no other: in tags, at the beginning of an answer. White space before it has a
#: limit, as all of it is searched again with every token.
THINKING = {
    "open_pattern": r"\A\s{0,16}(?:" + "|".join(f"<{tag}>" for tag in _TAGS) + ")",
    "close": [f"</{tag}>" for tag in _TAGS],
}
#: Tags around an answer, of templates that contain them (Granite, Hunyuan, ERNIE).
_ANSWER_TAGS = ("response", "answer")
#: What may follow a call: the end of a code fence around it, or of a tag that was not opened.
_AFTER_CALL = {"open_pattern": r"\s{0,8}(?:```(?!\w)|</tool_call>)", "close_pattern": ""}
_DELIMITERS = ("open", "open_pattern", "close", "close_pattern", "repeats", "optional")
#: In no text: what the prompt has begun is given to the parser without the prompt.
_NO_ANCHOR = r"(?!)"


@dataclass(frozen=True, eq=False)
class Format:
    """One form; compared by identity, as those of ``formats/`` exist once."""

    name: str
    regions: Mapping[str, Mapping[str, Any]]
    begun: tuple[str, ...] = tuple(f"<{tag}>" for tag in _TAGS)
    bare_calls: bool = False
    call: tuple[str, str, str] | None = None
    answer_begins: str = ""
    ends: tuple[str, ...] = ()
    own: Mapping[str, Any] | None = None
    """The tokenizer's response template, instead of ``regions``."""

    def response_template(self, reads_calls: bool) -> dict[str, Any]:
        """For ``ResponseParser``. Without ``reads_calls``, calls stay text."""
        if self.own is not None:
            fields = {
                name: _readable(spec) if name == "tool_calls" else spec
                for name, spec in self.own.get("fields", {}).items()
                if name != "tool_calls" or reads_calls
            }
            return {**self.own, "fields": fields}
        raw = {"content_args": {"strip": False}}
        kept = {}
        for name, region in self.regions.items():
            if not name.startswith(CALL_FIELDS):
                kept[name] = {"repeats": True, **raw, **region}
            elif reads_calls:
                kept[name] = {"repeats": True, **raw, **_fenced(region)}
                kept["after_call"] = {"repeats": True, **raw, **_AFTER_CALL}
        return {"start_anchor_pattern": _NO_ANCHOR, "fields": {"content": raw, **kept}}

    def begun_by(self, prompt: str) -> str:
        """The beginning of a region at the end of ``prompt``, or empty."""
        prompt = prompt.rstrip()
        return next((text for text in self.begun if prompt.endswith(text)), "")

    def call_begins(self, text: str, name_at: int) -> int | None:
        """Where the call begins whose name is at ``name_at`` in ``text``; ``None`` without a known tag."""
        regions = (self.own or {}).get("fields", self.regions)
        begins = [
            found.start()
            for name, region in regions.items()
            if name.startswith(CALL_FIELDS)
            for found in regex.finditer(_pattern(region, "open"), text)
            if found.start() <= name_at
        ]
        return max(begins, default=None)

    def last_call_ends(self, text: str) -> int | None:
        """The end of the last tag in ``text`` that closes a call; ``None`` without one."""
        regions = (self.own or {}).get("fields", self.regions)
        ends = [
            _pattern(regions[name], "close") for name in regions if name.startswith(CALL_FIELDS)
        ]
        found = [each.end() for end in ends if end for each in regex.finditer(end, text)]
        return max(found, default=None)

    def ends_in_call(self, text: str) -> bool:
        """Whether ``text`` ends with a tag that closes a call."""
        tail = text.rstrip("` \n")[-100:]
        return bool(tail) and self.last_call_ends(tail) == len(tail)

    @cached_property
    def markup(self) -> str:
        """All literals and patterns, to tell which control tokens the form needs."""
        described = self.own or {"regions": dict(self.regions), "begun": self.begun}
        return json.dumps(described, ensure_ascii=False).replace("\\\\", "").replace('\\"', '"')


def _pattern(region: Mapping[str, Any], edge: str) -> str:
    """What opens or closes a region; empty if nothing does."""
    given = region.get(edge, ())
    literals = [given] if isinstance(given, str) else given
    return "|".join(map(regex.escape, literals)) or region.get(f"{edge}_pattern", "")


def _fenced(region: Mapping[str, Any]) -> dict[str, Any]:
    """A region of calls that may begin in a code fence."""
    kept = {name: spec for name, spec in region.items() if name not in ("open", "open_pattern")}
    opens = _pattern(region, "open")
    # twice: an optional fence takes regex's partial search quadratic time
    return {**kept, "open_pattern": f"```\\w*\\s{{0,8}}(?:{opens})|(?:{opens})"}


def _readable(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tokenizer's region of calls in JSON, read by :mod:`.calls`: transformers' parser raises for JSON that
    is cut off, and what it had found is lost."""
    if spec.get("content") != "json":
        return spec
    kept = {name: spec[name] for name in _DELIMITERS if name in spec}
    names = "(?P<name>" in str(spec.get("open_pattern", ""))
    return {**kept, **({"transform": {"name": "{name}", "body": "{content}"}} if names else {})}


@cache
def format_in(template: str) -> Format:
    """The form of the first file whose markup is in ``template``."""
    form = next(
        form
        for name in ORDER
        for markup, form in [_known(name)]
        if not markup or any(text in template for text in markup)
    )
    tags = "|".join(tag for tag in _ANSWER_TAGS if f"<{tag}>" in template)
    if not tags:
        return form
    answer = {
        "open_pattern": rf"<(?:{tags})>\n?|\n?</(?:{tags})>\s{{0,8}}(?=\Z|<)",
        "close_pattern": "",
    }
    return replace(form, regions={**form.regions, "answer": answer})


@cache
def _known(name: str) -> tuple[list[str], Format]:
    text = files(__package__).joinpath("formats", f"{name}.json").read_text("utf-8")
    known: dict[str, Any] = json.loads(text)
    regions: dict[str, Any] = {"reasoning": THINKING}
    if "like" in known:
        regions |= _known(known["like"])[1].regions
    regions |= known["regions"]
    more: dict[str, Any] = {
        key: tuple(known[key]) for key in ("begun", "call", "ends") if key in known
    }
    more |= {key: known[key] for key in ("bare_calls", "answer_begins") if key in known}
    return known["markup"], Format(name, regions, **more)


def end_ids(tokens: Tokens, form: Format) -> frozenset[int]:
    """Tokens that end an answer, whatever a generation config or a GGUF file names."""
    named = {index for index, text in tokens.control_texts.items() if text in form.ends}
    return tokens.turn_ends | named


@lru_cache(maxsize=8)  # models have thousands of control tokens
def hidden_ids(tokens: Tokens, form: Format) -> frozenset[int]:
    """Control tokens without text: all but those by which an answer is taken apart."""
    needed = {index for index, text in tokens.control_texts.items() if text in form.markup}
    return tokens.framing_ids | (tokens.control_texts.keys() - needed)
