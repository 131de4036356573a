"""Prompt Cache's three use cases: source files, a learner's profile, a trip with parameters. Runs offline.

Each prompt is answered twice: with its modules loaded at the positions of the schema, and by a full prefill.
"""

import sys
import tempfile
from pathlib import Path

from blendrag import BlendEngine

SCHEMAS = Path(__file__).parent / "schemas"
PROMPTS = {
    "code.xml": """<prompt schema="code-generation-game"><unit.py/><player.py/><game.py/>
        Write main.py, which plays one turn.</prompt>""",
    "learner.xml": """<prompt schema="personalization-education">
        <level><high-school/></level><proficiency><beginner/></proficiency>
        <history><never-studied/></history><style><visual/></style>
        <assessment><essay/></assessment><motivation><needs-encouragement/></motivation>
        Explain how rain forms.</prompt>""",
    "trip.xml": """<prompt schema="travel"><travel-plan duration="three days">
        <overseas><rome/></overseas></travel-plan>
        What should I see on the first day?</prompt>""",
}

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
with (
    tempfile.TemporaryDirectory() as store,
    BlendEngine(model, store, max_new_tokens=32) as engine,
):
    for file, prompt in PROMPTS.items():
        report = engine.encode_schema(engine.add_schema(SCHEMAS / file))
        cached, full = engine.generate(pml=prompt), engine.generate(pml=prompt, mode="full")
        print(f"{file}: {report.modules} modules of {report.tokens} tokens are stored")
        for name, answer in (("cached", cached), ("full", full)):
            figures = answer.metrics
            print(
                f"  {name}: {figures.fresh_tokens} of {figures.prompt_tokens} tokens computed, "
                f"first token after {1000 * figures.ttft_s:.0f} ms: {answer.text[:60]!r}"
            )
