"""From what a caller asks to a :class:`Request`: rendered, its chunks recognised, cut into segments.

On the caller's thread. Nothing is computed, and no weights are loaded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from blendrag.chat.forcing import call_form, chosen_tool, opening_for
from blendrag.chat.formats import Format
from blendrag.chat.grammar import AnswerForm, answer_form, begun_call_form
from blendrag.chat.learned import format_of
from blendrag.chat.template_arguments import EFFORT, SWITCHES, template_arguments
from blendrag.config import DEFAULT_SCHEDULE, Mode
from blendrag.corpus.corpus import Corpus
from blendrag.engine.lazy_model import LazyModel
from blendrag.engine.model_corpus import ModelCorpus
from blendrag.engine.rendering import check_tools, render
from blendrag.engine.request import TO_THE_END, Options, Prompt, RagPrompt, Request, SchemaPrompt
from blendrag.engine.schemas import Schemas
from blendrag.errors import CorpusError, InvalidInputError, RequestTimeout
from blendrag.fusor.selection import Blending
from blendrag.text.known_chunks import ChunkText, KnownChunks, recognise
from blendrag.text.matches import Match
from blendrag.text.passages import FreshText
from blendrag.text.prompt import SegmentedPrompt, segment_prompt
from blendrag.text.rendered import Rendered

log = logging.getLogger(__name__)

#: Policy and ratio of modes that do not ask for them. Mode reuse is ratio 0; whatever mode prefix loads is
#: exact, so nothing is selected.
_OF_MODES: dict[Mode, tuple[str, float]] = {"reuse": ("reuse", 0.0), "prefix": ("full", 1.0)}
#: Options that say how a prompt is blended.
_BLENDING = ("policy", "schedule", "ratio", "min_ratio")


class Prompts:
    """Makes requests of the prompts of one engine. Keeps no state of its own. Thread-safe."""

    def __init__(self, model: LazyModel, corpus: ModelCorpus, schemas: Schemas) -> None:
        self._model, self._corpus = model, corpus
        self._schemas = schemas

    # -- prompts ----------------------------------------------------------------------------------

    def request(self, prompt: Prompt, options: Options, asked_at: float) -> Request:
        """The request for ``prompt``, with every default filled in.

        Raises :class:`InvalidInputError`, and :class:`RequestTimeout` if its time is over already.
        """
        if options.timeout_s is not None and time.perf_counter() - asked_at > options.timeout_s:
            raise RequestTimeout(options.timeout_s)  # earlier prompts took all the time
        began = time.perf_counter()
        settings, tokens = self._corpus.settings, self._model.tokens
        opening_s = time.perf_counter() - began
        mode = options.mode or settings.mode
        blending = self._blending(mode, options)
        fixed, fresh = None, None
        shared_ends: tuple[int, ...] = ()
        options, template_notes = self._templated(options)
        form = format_of(tokens) if self.uses_template(options) else None
        options = self._with_opening(options)
        begun = options.opening
        if isinstance(prompt, SchemaPrompt):
            segments, source_of, fixed = self._schemas.read(prompt, options, mode == "full")
            notes: tuple[str, ...] = ()
        else:
            rendered = self._rendered(prompt, options)
            if form is not None:
                begun = form.begun_by(rendered.text.removesuffix(options.opening)) + begun
            segments, source_of, notes, fresh = self._segments(rendered, options.scope)
            notes += template_notes
            shared_ends = rendered.shared_ends(bool(begun))
        if not segments.ids:
            raise InvalidInputError("the prompt is empty; ask something")
        if mode == "blend":
            notes += self._without_effect(options, blending)
        needed = self._answer_form(options, form)
        return Request(
            prompt=segments,
            options=options,
            mode=mode,
            blending=blending,
            max_new_tokens=options.max_new_tokens or settings.max_new_tokens or TO_THE_END,
            asked_at=asked_at,
            source_of=source_of,
            notes=notes + (() if needed is None else needed.notes),
            opening_s=opening_s,
            fresh=fresh,
            fixed=fixed,
            retrieval_s=prompt.retrieval_s if isinstance(prompt, RagPrompt) else 0.0,
            embedder_opening_s=prompt.opening_s if isinstance(prompt, RagPrompt) else 0.0,
            form=form,
            begun=begun,
            answer_form=needed,
            shared_ends=shared_ends,
        )

    def render(self, prompt: Prompt, options: Options) -> Rendered:
        """See :meth:`BlendEngine.render`."""
        return self._rendered(prompt, self._with_opening(self._templated(options)[0]))

    def segments(self, prompt: Prompt, options: Options) -> SegmentedPrompt:
        """See :meth:`BlendEngine.segments`."""
        options = self._with_opening(self._templated(options)[0])
        if isinstance(prompt, SchemaPrompt):
            return self._schemas.read(prompt, options, is_full=True)[0]
        rendered = self._rendered(prompt, options, may_be_empty=True)
        return self._segments(rendered, options.scope)[0]

    def _blending(self, mode: Mode, options: Options) -> Blending:
        """How the request is blended. Raises :class:`InvalidOptionError`."""
        settings = self._corpus.settings
        schedule = options.schedule or settings.schedule
        if mode in _OF_MODES:
            policy, fixed_ratio = _OF_MODES[mode]
            return Blending.of(policy, schedule, fixed_ratio)
        return Blending.of(
            options.policy or settings.policy,
            schedule,
            settings.ratio if options.ratio is None else options.ratio,
            settings.min_ratio if options.min_ratio is None else options.min_ratio,
        )

    def _without_effect(self, options: Options, blending: Blending) -> tuple[str, ...]:
        """Notes on options of a blended request that change nothing together with the others."""
        policy, why = blending.policy, {}
        given = [name for name in _BLENDING if getattr(options, name) is not None]
        if blending.ratio == 0:
            why = dict.fromkeys(("policy", "schedule"), "ratio 0 recomputes nothing")
        elif not policy.budgeted:
            same = f"policy {policy} recomputes the same tokens at any ratio and in every layer"
            why = dict.fromkeys(("schedule", "ratio", "min_ratio"), same)
        elif policy.schedule is not None and policy.schedule != blending.schedule:
            why["schedule"] = f"policy {policy} has its own, {policy.schedule}"
            if str(blending.schedule) != DEFAULT_SCHEDULE and "schedule" not in given:
                given.append("schedule")  # a default of the engine or the process
        if not blending.is_auto:
            why.setdefault("min_ratio", "it applies only to ratio=auto")
        ignored = [(why[name], name) for name in given if name in why]
        return tuple(
            f"{' and '.join(name for _, name in names)} ignored: {reason}"
            for reason, names in groupby(ignored, key=itemgetter(0))
        )

    # -- rendering ----------------------------------------------------------------------------------

    def uses_template(self, options: Options) -> bool:
        """Whether prompts go through the chat template."""
        return options.apply_chat_template and self._model.tokens.has_template

    def _templated(self, options: Options) -> tuple[Options, tuple[str, ...]]:
        """``options`` with all arguments of the chat template in ``chat_template_kwargs``, and notes on
        those without effect. The request's go before this engine's."""
        if not self.uses_template(options):
            return options, ()
        settings = self._corpus.settings
        thinks, effort = options.enable_thinking, options.reasoning_effort
        is_switched = thinks is not None or effort == "none"
        replaced = {*(SWITCHES if is_switched else ()), *({EFFORT} if effort else ())}
        defaults = {
            name: value
            for name, value in settings.chat_template_kwargs.items()
            if name not in replaced
        }
        given, notes = template_arguments(
            self._model.tokens,
            {**defaults, **options.chat_template_kwargs},
            thinks if is_switched else settings.enable_thinking,
            effort,
        )
        return replace(
            options, chat_template_kwargs=given, enable_thinking=None, reasoning_effort=None
        ), notes

    def _with_opening(self, options: Options) -> Options:
        """``options`` with the beginning of a call that must be made."""
        choice = chosen_tool(options.tool_choice, options.tools)
        if choice == "none":
            return replace(options, tools=(), tool_choice=None)
        if choice in (None, "auto"):
            return options
        tokens, template = self._model.tokens, options.template_arguments
        check_tools(tokens, options)
        opening = opening_for(tokens, choice, options.tools, template)
        return replace(options, tool_choice=choice, opening=opening)

    def _rendered(self, prompt: Prompt, options: Options, may_be_empty: bool = False) -> Rendered:
        settings = self._corpus.settings
        if options.plain_messages is None:
            options = replace(options, plain_messages=settings.plain_messages)
        if options.system is None:
            options = replace(options, system=settings.system)
        return render(prompt, self._model.tokens, options, may_be_empty)

    def _answer_form(self, options: Options, form: Format | None) -> AnswerForm | None:
        """The form that the answer must have."""
        tokens = self._model.tokens
        if not options.tools or form is None:
            return answer_form(options.response_format, tokens, form)
        calls = call_form(tokens, options.template_arguments)
        choice = options.tool_choice
        if isinstance(choice, str) and choice != "auto":
            return begun_call_form(tokens, calls, choice, options.tools)
        return answer_form(options.response_format, tokens, form, calls, options.tools)

    # -- segments -----------------------------------------------------------------------------------

    def _segments(
        self, rendered: Rendered, scope: str | None
    ) -> tuple[SegmentedPrompt, dict[str, str], tuple[str, ...], FreshText | None]:
        """A rendered prompt cut at its chunks, the source of each chunk, notes for the metrics, and what may
        be learned. ``scope``: whose passages are learned and used; ``None``: none are.

        A corpus that cannot be read is not used."""
        try:
            return self._segments_of(*self._corpus.usable(), rendered, scope)
        except CorpusError as error:
            log.warning("no chunk is recognised: %s", error)
            note = f"the corpus was not used, and the prompt was prefilled normally: {error}"
            return self._segments_of(None, note, rendered, None)

    def _cut_otherwise(self, chunks: Sequence[Match]) -> tuple[str, ...]:
        """A note if the prompt has parts of chunks."""
        if all(match.complete for match in chunks):
            return ()
        most = self._corpus.settings.chunk_tokens
        return (
            "some passages of this prompt are parts of chunks, as they were cut otherwise than the corpus; "
            f"those of at most {most} tokens that blendrag's splitter cuts are reused whole",
        )

    def _segments_of(
        self, corpus: Corpus | None, foreign: str, rendered: Rendered, scope: str | None
    ) -> tuple[SegmentedPrompt, dict[str, str], tuple[str, ...], FreshText | None]:
        """``foreign``: why the store's corpus is not used; empty if it is."""
        tokens, text_ids = self._model.tokens, self._model.text_ids

        def look_up(matches: Sequence[Match]) -> Mapping[str, ChunkText]:
            return corpus.chunks([m.chunk_id for m in matches]) if corpus is not None else {}

        control = tokens.control_spans(rendered.text)

        def recognised() -> KnownChunks:
            searched = corpus is not None and rendered.chunks is None
            index = corpus.known_to(scope) if corpus is not None and searched else None
            return recognise(rendered, control, index, look_up)

        found = recognised() if corpus is None else corpus.in_one_state(recognised)
        segments = segment_prompt(
            rendered.text,
            found.chunks,
            tokens,
            lambda chunk_id: text_ids(found.stored[chunk_id].text),
            found.plain,
        )
        notes = (*((foreign,) if foreign else found.notes), *self._cut_otherwise(found.chunks))
        notes += rendered.notes
        fresh = None if foreign or scope is None else found.fresh
        return segments, {i: chunk.source for i, chunk in found.stored.items()}, notes, fresh
