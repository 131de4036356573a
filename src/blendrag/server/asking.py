"""From a body to a request of the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from xml.sax.saxutils import quoteattr

from blendrag.chat.calls import tool_names
from blendrag.chat.forcing import chosen_tool, refuse_unreadable
from blendrag.chat.grammar import answer_form
from blendrag.chat.messages import REASONING, cleaned
from blendrag.chat.reply import Reply
from blendrag.chat.template_arguments import RESERVED
from blendrag.corpus.embedding_turns import Check, proceed
from blendrag.corpus.filters import Filter, chosen, nothing_found
from blendrag.corpus.retriever import RetrievedChunk
from blendrag.engine import Answer, BlendEngine, Message, Options, Prompt, SchemaPrompt
from blendrag.engine.rendering import build_rag_prompt
from blendrag.engine.request import RagPrompt
from blendrag.errors import InvalidInputError, InvalidOptionError, check_unicode
from blendrag.server.bodies import (
    BlendOptions,
    ChatBody,
    CompletionBody,
    Generating,
)
from blendrag.server.refusals import Refusal, over_limit, wrong_field
from blendrag.wording import quoted

#: Arguments of the template that have their own fields.
_RESERVED = RESERVED | {"documents", "add_generation_prompt", "continue_final_message"}
#: Most stop strings; every token of the answer is compared with all of them.
MAX_STOPS = 32
#: Most chunks that are retrieved; their texts are read before the prompt's length is known.
MAX_TOP_K = 1000
#: Texts with more characters for each token of the context are first tokenised up to here.
MAX_TOKEN_CHARS = 16


@dataclass(frozen=True)
class ServedRequest:
    """One request to the engine, and what its answer is read with."""

    prompt: Prompt
    options: Options
    sources: tuple[RetrievedChunk, ...] = ()
    left_out: int = 0
    """Messages that the prompt is without (``trim_history``)."""
    parallel_calls: bool = True
    shows_reasoning: bool = True

    def reply(self, answer: Answer, index: int) -> Reply:
        """One of the answers, with its first call only unless several are allowed, and without its reasoning
        if the client wants none."""
        found = answer.replies[index]
        if not self.shows_reasoning:
            found = replace(found, reasoning="")
        return found if self.parallel_calls else replace(found, calls=found.calls[:1])


def chat_request(
    engine: BlendEngine, body: ChatBody, limit: int | None, check: Check = proceed
) -> ServedRequest:
    """The request of a chat; ``limit``: the longest answer. Opens the tokenizer, searches the corpus.

    ``check`` may raise to give up while the question waits to be embedded.
    """
    tokens = engine.tokens
    if not tokens.has_template and body.schema_name is None:
        raise InvalidInputError(
            "this model has no chat template; send the prompt to /v1/completions instead"
        )
    messages = messages_of(body)
    _check_length(engine, messages, body)  # before anything is rendered or embedded
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    choice = chosen_tool(body.tool_choice, tools)
    parallel = body.parallel_tool_calls is not False
    if choice == "any" and not parallel and len(tools) == 1:
        (choice,) = tool_names(tools)  # which ends with one call
    offered = tools if choice != "none" else []
    if offered and (body.n or 1) > 1:
        raise wrong_field("n", f"is {body.n} with tools, expected 1; send {body.n} requests")
    refuse_unreadable(tokens, offered)
    template = dict(body.chat_template_kwargs or {})
    if reserved := sorted(_RESERVED.intersection(template)):
        raise wrong_field(
            "chat_template_kwargs",
            f"has {quoted(reserved[0])}, no argument of a template; leave it out",
        )
    template |= _prompt_end(body, messages, forced=choice not in (None, "auto", "none"))
    options = _options(
        engine,
        body,
        limit,
        body.longest,
        logprobs=_chat_logprobs(body),
        tools=tuple(offered),
        tool_choice=choice if offered else None,
        chat_template_kwargs=template,
        enable_thinking=body.thinks,
        reasoning_effort=body.reasoning_effort,
    )
    if body.schema_name is not None:
        imports = schema_prompt(body, messages)
        return ServedRequest(imports, options, shows_reasoning=body.shows_reasoning)
    prompt, sources = _with_texts(engine, body, messages, check)
    left_out = 0
    if body.blendrag and body.blendrag.trim_history:
        if not isinstance(prompt, RagPrompt):
            raise wrong_field("blendrag.trim_history", "without retrieve; add retrieve: true")
        prompt, left_out = _trimmed(engine, prompt, options, check)
    return ServedRequest(prompt, options, sources, left_out, parallel, body.shows_reasoning)


def _prompt_end(body: ChatBody, messages: Sequence[Message], forced: bool) -> Mapping[str, bool]:
    """Arguments of the template for how the prompt ends. ``forced``: whether the answer must be a call."""
    if not body.continue_final_message:
        return (
            {} if body.add_generation_prompt in (None, True) else {"add_generation_prompt": False}
        )
    last = messages[-1] if messages else {}
    wrong = ""
    if last.get("role") != "assistant" or last.get("tool_calls") or not last.get("content"):
        wrong = "a last message that is no text of the assistant"
    elif body.add_generation_prompt or forced:
        wrong = "a tool that must be called" if forced else "add_generation_prompt"
    if wrong:
        raise wrong_field("continue_final_message", f"with {wrong}; leave it out")
    return {"continue_final_message": True, "add_generation_prompt": False}


def prompts_of(body: CompletionBody) -> list[str]:
    """The prompts of a completion. Raises :class:`Refusal` for token ids."""
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise wrong_field(
            "prompt", "is empty or holds token ids, expected a text or a list of texts; send texts"
        )
    return [str(prompt) for prompt in prompts]


def completion_request(
    engine: BlendEngine,
    body: CompletionBody,
    prompt: str,
    limit: int | None,
    check: Check = proceed,
) -> ServedRequest:
    """The request of a completion: the prompt as it is; ``limit``: the longest answer."""
    check()
    best_of = None if body.best_of == (body.n or 1) else body.best_of
    _check_length(engine, prompt)
    for name, value in (("echo", body.echo), ("suffix", body.suffix), ("best_of", best_of)):
        if value:
            raise wrong_field(name, "is not supported; leave it out")
    options = _options(
        engine, body, limit, body.longest, logprobs=body.logprobs, apply_chat_template=False
    )
    return ServedRequest(prompt, options)


def _check_length(
    engine: BlendEngine, prompt: str | Sequence[Message], body: ChatBody | None = None
) -> None:
    """Refuse a prompt far over the context of which only the beginning was tokenised.

    What follows the beginning may change its last tokens, but not half of them. ``body`` has what else a chat
    template renders: tools and earlier calls.
    """
    context_tokens = engine.context_tokens
    most = MAX_TOKEN_CHARS * context_tokens
    messages = () if isinstance(prompt, str) else prompt
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in messages]
    if body is not None:
        texts += _other_texts(body, messages)
    if sum(map(len, texts)) <= most:
        return
    count = len(engine.tokens.encode_prompt("\n".join(texts)[:most]).ids)
    if count > 2 * context_tokens:
        raise Refusal(
            400,
            f"this model's context is {context_tokens} tokens; the prompt has more than {count}; shorten it",
            param="messages",
            code="context_length_exceeded",
        )


def _other_texts(body: ChatBody, messages: Sequence[Message]) -> Iterator[str]:
    """What a chat's prompt may hold besides the contents of its messages."""
    for turn in body.messages:
        yield from (turn.name or "", turn.tool_call_id or "")
    for message in messages:
        yield message.get(REASONING, "")
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            yield from (call["id"], call["function"]["name"])
            with suppress(RecursionError, ValueError, TypeError):
                is_text = isinstance(arguments, str)
                yield arguments if is_text else json.dumps(arguments, ensure_ascii=False)
    for tool in body.tools or ():
        with suppress(RecursionError, ValueError):  # refused when the prompt is rendered
            yield json.dumps(tool.model_dump(exclude_none=True), ensure_ascii=False)


def _options(
    engine: BlendEngine,
    body: Generating,
    limit: int | None,
    max_new_tokens: int | None,
    **more: Any,
) -> Options:
    """Options of the engine. Raises :class:`Refusal` for what it cannot do."""
    if isinstance(body.stop, list) and len(body.stop) > MAX_STOPS:
        raise over_limit(
            "stop", f"has {len(body.stop)} texts, expected at most {MAX_STOPS}; send fewer"
        )
    if max_new_tokens is None and limit is not None:
        max_new_tokens = min(engine.settings.max_new_tokens or limit, limit)
    if limit is not None and max_new_tokens is not None and max_new_tokens > limit:
        raise over_limit(
            "max_tokens",
            f"is {max_new_tokens}, and this server allows at most {limit} (--max-tokens); ask for fewer",
        )
    blend = body.blendrag.model_dump(exclude_none=True) if body.blendrag else {}
    for name in ("top_k", "search", "only", "where", "trim_history"):
        blend.pop(name, None)
    return Options(
        max_new_tokens=max_new_tokens,
        temperature=_temperature(body),
        # 1 keeps all tokens; clients send it without a temperature
        top_p=None if body.top_p == 1 else body.top_p,
        stop=tuple([body.stop] if isinstance(body.stop, str) and body.stop else body.stop or ()),
        seed=body.seed,
        cache_salt=body.cache_salt,
        tenant=body.tenant,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_biases(body),
        response_format=_form(body, engine),
        generate_kwargs=_generate(body),
        **blend,
        **more,
    )


def _temperature(body: Generating) -> float | None:
    """OpenAI's default of 1 for requests that ask for sampling; without any such field decoding is greedy."""
    if body.temperature is not None:
        return body.temperature
    shares = (body.top_p or 1) != 1 or (body.typical_p or 1) != 1 or body.min_p
    return 1.0 if shares or (body.n or 1) > 1 or (body.top_k or 0) > 0 else None


def _generate(body: Generating) -> Mapping[str, Any]:
    """Arguments of ``generate``, without those that change nothing."""
    n = body.n or 1
    samples = bool(_temperature(body))
    if n > 1 and not samples:
        raise wrong_field(
            "n",
            f"is {n} with temperature 0, so all answers would be equal; give a temperature above 0",
        )
    if body.longest is not None and body.min_tokens and body.min_tokens > body.longest:
        raise wrong_field(
            "min_tokens",
            f"is {body.min_tokens}, expected at most max_tokens, which is {body.longest}; lower it",
        )
    arguments = {
        "num_return_sequences": n if n > 1 else None,
        "top_k": max(0, body.top_k or 0) if samples else None,
        "min_p": body.min_p if samples else None,
        "repetition_penalty": body.repetition_penalty,
        "typical_p": body.typical_p if samples and body.typical_p != 1 else None,
        "min_new_tokens": body.min_tokens,
        "no_repeat_ngram_size": body.no_repeat_ngram_size,
    }
    given: dict[str, Any] = {name: value for name, value in arguments.items() if value}
    return given | {"eos_token_id": []} if body.ignore_eos else given


def _biases(body: Generating) -> Mapping[int, float] | None:
    if not body.logit_bias:
        return None
    try:
        return {int(token): bias for token, bias in body.logit_bias.items()}
    except ValueError:  # a word, or thousands of digits
        raise wrong_field(
            "logit_bias",
            f"has the key {quoted(next(iter(body.logit_bias)))}, expected ids of tokens; "
            'send them as in {"42": -100}',
        ) from None


#: How vLLM's clients name forms, and what ``response_format`` calls them.
_GUIDED = ("json", "regex", "choice", "grammar")


def _form(body: Generating, engine: BlendEngine) -> Mapping[str, Any] | None:
    """The form of the answer, however a client asks for it. Raises :class:`Refusal` for two of them, and
    :class:`InvalidOptionError` with the client's name for one that cannot be compiled."""
    given: dict[str, dict[str, Any]] = {}
    if body.response_format is not None:
        given["response_format"] = dict(body.response_format)
    requested = {f"guided_{name}": getattr(body, f"guided_{name}") for name in _GUIDED}
    requested |= {f"structured_outputs.{n}": v for n, v in (body.structured_outputs or {}).items()}
    for field, value in requested.items():
        name = field.removeprefix("guided_").removeprefix("structured_outputs.")
        if value is None or (name == "json_object" and value is False):
            continue
        if name == "json_object":
            given[field] = {"type": name}
        elif name == "json":
            given[field] = {"type": "json_schema", "json_schema": {"schema": _schema(value, field)}}
        elif name in _GUIDED:
            given[field] = {"type": name, name: value}
        else:
            raise wrong_field(
                "structured_outputs",
                f"has {quoted(name)}, expected one of {', '.join(_GUIDED)}, json_object; leave it out",
            )
    if len(given) > 1:
        raise Refusal(
            400,
            f"{len(given)} forms of the answer ({', '.join(given)}), expected one of response_format, "
            "structured_outputs and guided_*; leave out the others",
            param=next(iter(given)),
        )
    if given and (body.n or 1) > 1:
        raise wrong_field("n", f"is {body.n} with a form of the answer; send {body.n} requests")
    for field, form in given.items():
        if field != "response_format":  # else the engine names it
            try:
                answer_form(form, engine.tokens)
            except InvalidOptionError as error:
                raise error.called(field) from None
        return form
    return None


def _schema(value: Any, field: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise Refusal(
            400, f"{field} is not JSON; send a JSON schema as an object", param=field
        ) from None


def _chat_logprobs(body: ChatBody) -> int | None:
    """Alternatives per token; ``None`` if log probabilities are not asked for."""
    if not body.logprobs:
        if body.top_logprobs:
            raise wrong_field("top_logprobs", "without logprobs; add logprobs: true")
        return None
    return body.top_logprobs or 0


# -- messages -------------------------------------------------------------------------------------


def messages_of(body: ChatBody) -> list[Message]:
    """The messages of a chat, in one form. Raises :class:`InvalidInputError` for content that is no text."""
    return [*cleaned([turn.model_dump(exclude_none=True) for turn in body.messages])]


# -- prompt schemas -------------------------------------------------------------------------------


def schema_prompt(body: ChatBody, messages: Sequence[Message]) -> SchemaPrompt:
    """The only message as markup of the schema that ``body`` names. Raises :class:`Refusal`."""
    for field in ("tools", "documents", "retrieve"):
        if getattr(body, field):
            raise wrong_field("schema", f"and {field}, expected one of them; leave out the other")
    if len(messages) != 1 or messages[0]["role"] != "user":
        raise Refusal(
            400,
            f"schema with {len(messages)} messages, expected one of the user that imports modules; write "
            "earlier turns into it as <user> and <assistant>",
            param="messages",
        )
    content = messages[0]["content"]
    name = quoteattr(body.schema_name or "")
    return SchemaPrompt(f"<prompt schema={name}>{content}</prompt>", "messages[0]")


# -- texts to answer from -------------------------------------------------------------------------


def _with_texts(
    engine: BlendEngine, body: ChatBody, messages: list[Message], check: Check
) -> tuple[Prompt, tuple[RetrievedChunk, ...]]:
    """The prompt with the texts that the request brings or wants retrieved, and the retrieved ones.

    The last message is the question. Retrieved chunks are known; brought documents are recognised, and
    learned, like any other text of a prompt. Both are data, never markup.
    """
    given = body.blendrag or BlendOptions()
    filters = {
        "filters": body.filters, "blendrag.only": given.only, "blendrag.where": given.where
    }  # fmt: skip
    if not body.retrieve:
        for name in (name for name, value in filters.items() if value is not None):
            raise wrong_field(name, "without retrieve; add retrieve: true")
    searched = _filter_of(body)
    if not (body.retrieve or body.documents):
        return messages, ()
    if body.retrieve and body.documents:
        raise Refusal(
            400,
            "documents and retrieve, expected one of them; leave out the other",
            param="retrieve",
        )
    *history, last = messages or [{}]
    if last.get("role") != "user":
        name = "retrieve" if body.retrieve else "documents"
        raise Refusal(
            400,
            f"{name} with a last message that is not the user's question; put the question last",
            param="messages",
        )
    question, tokens = last["content"], engine.tokens
    own = body.blendrag.prompt_template if body.blendrag else None
    template = own or engine.settings.prompt_template
    if body.documents:
        titled = [_titled(each, number) for number, each in enumerate(body.documents)]
        named = [title for title, _ in titled] if tokens.names_sources else None
        texts = [text for _, text in titled]
        over = build_rag_prompt(question, texts, named, template=template)
        _check_length(engine, [*history, {"role": "user", "content": over.text}])
        return replace(over, chunks=None, history=tuple(history)), ()
    earlier = [message["content"] for message in history if message["role"] == "user"]
    top_k = body.blendrag.top_k if body.blendrag else None
    search = body.blendrag.search if body.blendrag else None
    if top_k is not None and top_k > MAX_TOP_K:
        raise over_limit("blendrag.top_k", f"is {top_k}, expected at most {MAX_TOP_K}; lower it")
    before = earlier[-1] if earlier else ""
    chunks = tuple(
        engine.retrieve(
            question, top_k, search=search, filter=searched, earlier=before, check=check
        )
    )
    if searched is not None and not chunks:
        raise nothing_found(searched)
    named = [chunk.file_name for chunk in chunks] if tokens.names_sources else None
    texts = [chunk.text for chunk in chunks]
    over = build_rag_prompt(question, texts, named, template=template)
    return replace(over, history=tuple(history)), chunks


def _trimmed(
    engine: BlendEngine, prompt: RagPrompt, options: Options, check: Check
) -> tuple[RagPrompt, int]:
    """``prompt`` without as many of the oldest turns as its answer needs room, and how many messages those
    are. Messages before the user's first stay."""
    history = prompt.history
    turns = [at for at, message in enumerate(history) if message["role"] == "user"]
    begins = [*turns, len(history)]

    def without(left_out: int) -> RagPrompt:
        check()
        kept = history[: begins[0]] + history[begins[left_out] :]
        return replace(prompt, history=kept)

    _, left_out = engine.asking.trimmed(without, len(turns), options)
    return without(left_out), begins[left_out] - begins[0]


def _filter_of(body: ChatBody) -> Filter | None:
    """Which documents are searched: all filters of the request must pass. Raises
    :class:`InvalidOptionError`."""
    given = body.blendrag or BlendOptions()
    only, where = ([each] if isinstance(each, str) else each for each in (given.only, given.where))
    written = chosen(only, where, ("blendrag.only", "blendrag.where"))
    if body.filters is None:
        return written
    filters = Filter.parse(body.filters)
    return filters if written is None else filters & written


def _titled(document: str | Mapping[str, Any], number: int) -> tuple[str, str]:
    """Title and text of a document: a text, ``{"title", "text"}``, or either of them as ``{"data": …}``."""
    given: Any = document
    if isinstance(given, Mapping) and "data" in given:
        given = (
            {"title": given.get("id"), **data}
            if isinstance(data := given["data"], Mapping)
            else data
        )
    if isinstance(given, str):
        given = {"text": given}
    text = given.get("text", given.get("snippet")) if isinstance(given, Mapping) else None
    if not isinstance(text, str) or not text.strip():
        raise wrong_field(
            f"documents[{number}]",
            "has no text, expected a text or an object with title and text; leave out empty ones",
        )
    check_unicode(text, f"documents[{number}]")
    title = given.get("title")
    return (title if isinstance(title, str) else f"document {number + 1}"), text
