"""Prompt Cache's three use cases: source files, a learner's profile, a trip with parameters. Runs offline.

Each prompt is answered twice: with its modules loaded at the positions of the schema, and by a full prefill.
The model is SmolLM2, if ``blendrag demo`` would take it, or the one that you name. The small embedded model
can only answer the first prompt, which is about people of its corpus.

python examples/prompt_schemas.py [MODEL]
"""

import sys
import tempfile
from pathlib import Path

from blendrag import BlendEngine
from blendrag.demo import smollm2

SCHEMAS = Path(__file__).parent / "schemas"
PEOPLE = {
    "people.xml": """<prompt schema="people"><tom-baker/><anna-bell/>
        Which sport does Anna Bell enjoy?</prompt>""",
}
PROMPTS = {
    "code.xml": """<prompt schema="code-generation-game"><unit.py/><player.py/><game.py/>
        What is the health of a new unit? Answer with a number only.</prompt>""",
    "learner.xml": """<prompt schema="personalization-education">
        <level><high-school/></level><proficiency><beginner/></proficiency>
        <history><never-studied/></history><style><visual/></style>
        <assessment><essay/></assessment><motivation><needs-encouragement/></motivation>
        Is the learner a beginner or an expert?</prompt>""",
    "trip.xml": """<prompt schema="travel"><travel-plan duration="three days">
        <overseas><rome/></overseas></travel-plan>
        What should I see on the first day?</prompt>""",
}


def show(engine, file, prompt):
    """Print what is stored of the schema, and both answers."""
    report = engine.encode_schema(engine.add_schema(SCHEMAS / file))
    cached, full = engine.generate(pml=prompt), engine.generate(pml=prompt, mode="full")
    print(f"{file}: {report.modules} modules of {report.tokens} tokens are stored")
    print(" ", prompt.removesuffix("</prompt>").splitlines()[-1].strip())
    for name, answer in (("cached", cached), ("full", full)):
        figures = answer.metrics
        print(
            f"  {name}: {figures.fresh_tokens} of {figures.prompt_tokens} tokens computed, "
            f"first token after {1000 * figures.ttft_s:.0f} ms: {answer.text.strip()!r}"
        )


if __name__ == "__main__":
    packaged = "demo" if smollm2.missing() else str(smollm2.smollm2_path())
    model = sys.argv[1] if len(sys.argv) > 1 else packaged
    prompts = PEOPLE if model == "demo" else PEOPLE | PROMPTS
    with (
        tempfile.TemporaryDirectory() as store,
        BlendEngine(model, store, max_new_tokens=32) as engine,
    ):
        for file, prompt in prompts.items():
            show(engine, file, prompt)
    if model == "demo":
        print("For the other prompts:", " && ".join((*smollm2.missing(), "run this again")))
