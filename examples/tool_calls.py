"""The table of docs/integrations.md: how often small models call the right one of three tools.

python examples/tool_calls.py MODEL …
"""

import sys
import tempfile
from pathlib import Path

from blendrag import BlendEngine
from blendrag.errors import BlendragError


def tool(name, description, **parameters):
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in parameters.items()},
        "required": list(parameters),
    }
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [
    tool("get_weather", "The weather of a town today", town="string"),
    tool("set_timer", "Rings after a number of minutes", minutes="integer"),
    tool("send_message", "Sends a text to a person", person="string", text="string"),
]
#: Question → the tool and the argument that must be right.
CALLS = {
    "What is the weather in Oslo right now?": ("get_weather", "town", "Oslo"),
    "Do I need an umbrella in Lisbon today?": ("get_weather", "town", "Lisbon"),
    "Set a timer for 12 minutes.": ("set_timer", "minutes", 12),
    "Remind me in 45 minutes to take the bread out.": ("set_timer", "minutes", 45),
    "Send Maria the message: dinner is at eight.": ("send_message", "person", "Maria"),
    "Tell Jonas that the train is late.": ("send_message", "person", "Jonas"),
}
NO_CALLS = (
    "What is the capital of France?",
    "Write two lines about snow.",
    "Thank you, that was all.",
    "What is a timer?",
)
HEAD = (
    "| model | right calls | calls where no tool is needed | right, with `tool_choice` `any` |\n"
    "|---|---|---|---|"
)


def row(model):
    """How the model does; one cell if its chat template has no tools."""
    name = Path(model).name
    with (
        tempfile.TemporaryDirectory() as store,
        BlendEngine(model, store, mode="prefix", max_new_tokens=48) as engine,
    ):

        def called(question, choice):
            messages = [{"role": "user", "content": question}]
            calls = engine.generate(messages, tools=TOOLS, tool_choice=choice).tool_calls
            return {(call.name, *item) for call in calls for item in call.arguments.items()}

        try:
            right = sum(wanted in called(text, "auto") for text, wanted in CALLS.items())
        except BlendragError as exc:
            return f"| {name} | none: {exc} | | |"
        needless = sum(bool(called(text, "auto")) for text in NO_CALLS)
        forced = sum(wanted in called(text, "any") for text, wanted in CALLS.items())
    of = len(CALLS)
    return f"| {name} | {right} of {of} | {needless} of {len(NO_CALLS)} | {forced} of {of} |"


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(__doc__)
    print(HEAD, *map(row, sys.argv[1:]), sep="\n")
