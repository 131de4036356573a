"""Offering tools to a local model: through its chat template, or in plain text where that has no place.

Owns LlamaIndex's methods for tools. Does not know how an answer is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.llms.function_calling import FunctionCallingLLM

from blendrag.errors import InvalidInputError
from blendrag.frameworks.fields import RequestFields
from blendrag.frameworks.tool_choice import call_form, tool_names
from blendrag.frameworks.tools import has_tools
from llama_index.llms.blendrag import _tools

if TYPE_CHECKING:
    from llama_index.core.chat_engine.types import AgentChatResponse
    from llama_index.core.llms.llm import ToolSelection
    from llama_index.core.tools.types import BaseTool

    from blendrag.engine import Options


class ToolCalling(RequestFields, FunctionCallingLLM):
    """The part of :class:`BlendLLM` that knows tools."""

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Arguments of :meth:`chat`. Raises :class:`InvalidInputError` for a model without tools."""
        specs = [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools]
        if specs:
            self._check_tools(specs, self.request_options())
        messages = list(chat_history or ())
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        if user_msg is not None:
            messages.append(user_msg)
        if specs:
            # asked for by LlamaIndex unasked: where a template can't force calls, the model chooses
            can_force = tool_required and call_form(self.engine.resources.tokens) is not None
            kwargs |= {
                "tools": specs,
                "tool_choice": tool_choice or ("any" if can_force else None),
                "parallel_tool_calls": allow_parallel_tool_calls,
            }
        return {"messages": messages, **kwargs}

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Raises :class:`InvalidInputError` for a response without calls, unless told not to."""
        return _tools.selections(response, error_on_no_tool_call)

    def predict_and_call(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        error_on_no_tool_call: bool = True,
        error_on_tool_error: bool = False,
        **kwargs: Any,
    ) -> AgentChatResponse:
        """As in LlamaIndex: a model whose template has no place for tools is asked in plain text (ReAct).

        Raises :class:`InvalidInputError` for no tools, and where none was called unless
        ``error_on_no_tool_call=False``.
        """
        response = super().predict_and_call(
            tools,
            user_msg,
            chat_history,
            verbose,
            allow_parallel_tool_calls,
            error_on_no_tool_call,
            error_on_tool_error,
            **self._asking(tools, kwargs),
        )
        return _called(response, tools) if error_on_no_tool_call else response

    async def apredict_and_call(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        error_on_no_tool_call: bool = True,
        error_on_tool_error: bool = False,
        **kwargs: Any,
    ) -> AgentChatResponse:
        """:meth:`predict_and_call`, awaited."""
        response = await super().apredict_and_call(
            tools,
            user_msg,
            chat_history,
            verbose,
            allow_parallel_tool_calls,
            error_on_no_tool_call,
            error_on_tool_error,
            **self._asking(tools, kwargs),
        )
        return _called(response, tools) if error_on_no_tool_call else response

    def _asking(self, tools: Sequence[BaseTool], given: dict[str, Any]) -> dict[str, Any]:
        """``given``, and how to ask in plain text: LlamaIndex (seen to 0.14.25) passes its agent ``None``
        for what it was not given there, which the agent refuses."""
        if not tools:
            raise InvalidInputError(
                "there are no tools to call, expected one or more; use chat instead"
            )
        if self.metadata.is_function_calling_model:
            return given
        from llama_index.core.agent.react import ReActChatFormatter, ReActOutputParser

        plain = {"react_chat_formatter": ReActChatFormatter(), "output_parser": ReActOutputParser()}
        return plain | {name: value for name, value in given.items() if value is not None}

    def _check_tools(self, specs: Sequence[_tools.Spec], options: Options) -> None:
        given = ", ".join(tool_names(specs))
        if not options.apply_chat_template:
            raise InvalidInputError(
                f"apply_chat_template=False with tools ({given}), which reach the model through its "
                "template; leave one of them out"
            )
        resources = self.engine.resources
        if not has_tools(resources.tokens):
            raise InvalidInputError(
                f"the chat template of {resources.model_name!r} takes no tools ({given}); use a "
                "ReActAgent, which asks for them in plain text"
            )


def _called(response: AgentChatResponse, tools: Sequence[BaseTool]) -> AgentChatResponse:
    """``response``; asked in plain text, LlamaIndex makes an empty one of an answer that calls nothing."""
    if response.sources or response.response:
        return response
    names = ", ".join(str(tool.metadata.name) for tool in tools)
    raise InvalidInputError(
        f"the model called no tool ({names}) when asked in plain text, expected a call; ask for it more "
        "plainly, or pass error_on_no_tool_call=False"
    )
