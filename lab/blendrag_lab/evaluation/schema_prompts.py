"""Cases as prompts of a schema whose modules are their chunks (Prompt Cache).

The system message holds the instruction and the chunks, and the question is a message of its own, because a
message of a schema ends with the schema. Models without a chat template get the same texts in one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from blendrag.engine import BlendEngine
from blendrag.engine.rendering import SEPARATOR
from blendrag.engine.request import SchemaPrompt
from blendrag.engine.schemas import Positions
from blendrag.schema.nodes import Location, Module, Role, Scaffold, Schema, SchemaNode, Text
from blendrag.text.chunking import canonical
from blendrag_lab.evaluation.asking import Wording
from blendrag_lab.evaluation.datasets import Case
from blendrag_lab.evaluation.ways import NONE, PLACED, SCAFFOLD
from blendrag_lab.synthetic.samples import CONTEXT, QUESTION

#: The schema of blended prompts and of full prefill.
BLEND = "blend"
_AT = Location("<eval>", 1)


def add_schemas(engine: BlendEngine, chunks: Sequence[str], wording: Wording) -> None:
    """The schemas of a context: without modules, blended, placed, and placed with a scaffold of all modules.
    The modules of the last two are encoded."""
    has_roles = engine.adapter.tokens.has_template
    head = wording.template.split(CONTEXT)[0]
    for name in (NONE, BLEND, *PLACED):
        nodes = tuple(_nodes(head, () if name == NONE else chunks))
        names = tuple(node.name for node in nodes if isinstance(node, Module))
        scaffolds = (Scaffold(names, _AT),) if name == SCAFFOLD and len(names) > 1 else ()
        children: tuple[SchemaNode, ...] = (Role("system", nodes, _AT),) if has_roles else nodes
        positions: Positions = "schema" if name in PLACED else "blend"
        engine.add_schema(Schema(name, children, scaffolds, _AT), positions)
        if name in PLACED:
            engine.encode_schema(name)


def _nodes(head: str, chunks: Sequence[str]) -> Iterator[Text | Module]:
    yield Text(head, _AT)
    for i, chunk in enumerate(chunks):
        yield Module(f"chunk-{i}", (Text(canonical(chunk), _AT),), _AT)
        yield Text(SEPARATOR, _AT)


def schema_prompt(case: Case, chunks: Sequence[str], wording: Wording, policy: str) -> SchemaPrompt:
    """The question of ``case`` after its first ``chunks``."""
    name = policy if policy in (NONE, *PLACED) else BLEND
    imports = "".join(f"<chunk-{i}/>" for i in range(len(chunks)))
    tail = wording.template.split(CONTEXT)[1].removeprefix(SEPARATOR)
    asked = escape(tail.replace(QUESTION, case.question.strip()))
    return SchemaPrompt(f'<prompt schema="{name}">{imports}{asked}</prompt>')
