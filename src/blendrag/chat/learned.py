"""The form of a model's answers. It is learned from what the chat template writes if the template's markup is
in no file of ``formats/``.

The template renders an answer with a known thought, text and calls; what it puts around them are the tags. A
form counts only if by it the rendered answer is taken apart again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import regex

from blendrag.chat.calls import ToolCall, read_calls
from blendrag.chat.formats import THINKING, Format, format_in
from blendrag.chat.messages import function_call
from blendrag.chat.probes import KEY, NAME, TOOL, USER, try_render
from blendrag.chat.reply import take_apart
from blendrag.text.matches import common_prefix

if TYPE_CHECKING:
    from blendrag.model.tokens import Tokens

_VALUE, _OTHER = "first value", "second value"
_TEXT, _THOUGHT = "The text of the answer.", "The thought before it."
_NAMED, _BODY = r"(?P<name>[^\s<>\"'{}|]+)", {"transform": {"name": "{name}", "body": "{content}"}}
#: Ids of calls are nine letters, as Mistral's template requires.
_IDS, _ID, _SOME_ID = "a1b2c3d4{}", regex.compile(r"a1b2c3d4\d"), "someidofacall"


def format_of(tokens: Tokens) -> Format:
    """The form of this model's answers."""
    own = getattr(tokens.tokenizer, "response_template", None)
    if isinstance(own, Mapping):
        return Format("tokenizer", {}, own=own)
    return _learned(tokens, tokens.template_text)


@lru_cache(maxsize=8)  # needed several times per request
def _learned(tokens: Tokens, template: str) -> Format:
    """The form chosen by the markup of ``template``, or the one that the template writes."""
    known = format_in(template)
    header, end = _frame(tokens)
    if not header:
        return known
    one, two = (_said(tokens, header, end, count) for count in (1, 2))
    if NAME not in one or _reads(known, one, 1):
        return _with_reasoning(tokens, known, header)
    for found in _call_regions(one, two):
        # the template's tokens count as markup, without matching anything
        kept = {"open_pattern": f"(?!){regex.escape(two or one)}", "close_pattern": ""}
        made = Format("template", {**known.regions, **found, "kept": kept}, begun=known.begun)
        if _reads(made, one, 1) and (_OTHER not in two or _reads(made, two, 2)):
            return _with_reasoning(tokens, made, header)
    return _with_reasoning(tokens, known, header)


def _render(tokens: Tokens, answer: Mapping[str, Any]) -> str:
    """The first rendering that the template does not refuse, or empty."""
    for as_text in (False, True):
        calls = list(answer.get("tool_calls", ()))
        if as_text:
            functions = [(call["id"], call["function"]["arguments"]) for call in calls]
            calls = [function_call(each, NAME, json.dumps(given)) for each, given in functions]
        given = {**answer, "tool_calls": calls} if calls else dict(answer)
        for tools in ([TOOL], None):
            made = try_render(tokens, [USER, given], tools=tools, add_generation_prompt=False)
            if made is not None:
                return made
    return ""


def _frame(tokens: Tokens) -> tuple[str, str]:
    """What the template writes before and after an answer's text."""
    before, found, after = _render(tokens, {"role": "assistant", "content": _TEXT}).partition(_TEXT)
    return (before, after) if found else ("", "")


def _said(tokens: Tokens, header: str, end: str, count: int) -> str:
    """An answer with its text and calls, as the model would have said it."""
    values = enumerate((_VALUE, _OTHER)[:count])
    calls = [function_call(_IDS.format(i), NAME, {KEY: value}) for i, value in values]
    whole = _render(tokens, {"role": "assistant", "content": _TEXT, "tool_calls": calls})
    return _answer(tokens, whole, header).removesuffix(end)


def _answer(tokens: Tokens, whole: str, header: str) -> str:
    """``whole`` without the prompt."""
    for asks in (True, False):
        prompt = try_render(tokens, [USER], tools=[TOOL], add_generation_prompt=asks)
        if prompt is not None and whole.startswith(prompt):
            return whole[len(prompt) :]
    return whole[common_prefix(whole, header) :]


def _reads(form: Format, said: str, count: int) -> bool:
    """Whether ``said`` is taken apart into its text and that many calls."""
    found = take_apart(said, form, [TOOL])
    expected = [{KEY: value} for value in (_VALUE, _OTHER)[:count]]
    arguments = [call.arguments for call in found.calls if call.name == NAME]
    return arguments == expected and not found.invalid and NAME not in found.text


def _call_regions(one: str, two: str) -> Iterator[dict[str, Any]]:
    """Regions that may hold the call in ``one`` and both in ``two``."""
    name_at, value_at = one.find(NAME), one.find(_VALUE)
    if not 0 <= name_at < value_at:
        return
    begins = one.find(_TEXT) + len(_TEXT) if _TEXT in one[:name_at] else 0
    before, rest = one[begins:name_at], one[name_at:]
    least = value_at - name_at + len(_VALUE)
    for cut in range(len(before)):
        if before[cut] in "]})>" or before[cut].isspace():
            continue
        end = next(
            (e for e in range(least, len(rest) + 1) if _is_call(before[cut:] + rest[:e])), None
        )
        if end is None:
            continue
        if before[:cut].strip():
            close = regex.sub(r"\A[\s\]})\"',;]+", "", rest[end:])
            yield {"tool_calls": _region(_loosely(before[:cut]), _loosely(close))}
        elif tag := regex.search(r"</[^<>]+>\Z", rest[:end]):  # a call without a tag around it
            opens = f'{_loosely(before[cut:])}{_NAMED}"?[^<>]*>'
            yield {"tool_calls": _region(opens, regex.escape(tag[0])) | _BODY}
    yield from _named_regions(before, rest, two)


def _is_call(text: str) -> bool:
    calls, after = read_calls(text, [TOOL])
    found = [(c.name, c.arguments) for c in calls if isinstance(c, ToolCall)]
    return found == [(NAME, {KEY: _VALUE})] and len(calls) == 1 and not after


def _region(opens: str, closes: str) -> dict[str, Any]:
    return {"open_pattern": opens, **({"close_pattern": closes} if closes else {})}


def _named_regions(before: str, rest: str, two: str) -> Iterator[dict[str, Any]]:
    """A region for each call, whose name is in the tag and whose arguments are JSON."""
    json_at = rest.find("{")
    try:
        given, end = json.JSONDecoder().raw_decode(rest, max(0, json_at))
    except ValueError:
        return
    if given != {KEY: _VALUE}:
        return
    between = rest[len(NAME) : json_at]
    opens, closes = before, rest[end:]
    inner = _ID.sub(_SOME_ID, two.partition(_VALUE)[2].partition(NAME)[0].partition("}")[2])
    before = _ID.sub(_SOME_ID, before)
    shared = before[len(before) - common_prefix(before[::-1], inner[::-1]) :]
    begins = regex.search(r"[<\[{(]", shared)
    if shared := shared[begins.start() :] if begins else shared.strip():
        opens, closes = shared, inner.removesuffix(shared)  # of each call, without the tags of all
    region = _region(f"{_loosely(opens)}{_NAMED}{_loosely(between)}", _loosely(closes))
    around = (before.removesuffix(opens), rest[end:].removeprefix(closes))
    outer = "|".join(_loosely(text) for text in around if text.strip())
    unshown = {"unshown": _region(outer, "") | {"close_pattern": ""}} if outer else {}
    yield {"tool_calls": region | _BODY, **unshown}


def _loosely(text: str) -> str:
    """A pattern for ``text`` with any white space and any id."""
    text = _ID.sub(_SOME_ID, text.strip())
    words = (regex.escape(part) for part in regex.split(r"\s+", text))
    return r"\s*".join(words).replace(_SOME_ID, r"[^\s<>\"]*")


def _with_reasoning(tokens: Tokens, form: Format, header: str) -> Format:
    """With the tags that the template puts around reasoning, if ``form`` does not know them."""
    if form.regions["reasoning"] is not THINKING:
        return form
    thinks = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHT)
    whole = _render(tokens, {"role": "assistant", "content": _TEXT, **thinks})
    said = _answer(tokens, whole, header)
    if said.startswith(_THOUGHT):  # the prompt begins the thought
        said = whole[common_prefix(whole, header) :]
    opens, _, after = said.partition(_THOUGHT)
    closes = after.partition(_TEXT)[0]
    if not (opens.strip() and closes.strip() and said.count(_THOUGHT) == said.count(_TEXT) == 1):
        return form
    read = take_apart(said[: said.find(_TEXT) + len(_TEXT)], form)
    if read.reasoning == _THOUGHT and read.text == _TEXT:
        return form
    region = {"open": opens.strip(), "close": closes.strip()}
    begun = (region["open"], *form.begun)
    return replace(form, regions={**form.regions, "reasoning": region}, begun=begun)
