"""Names mean one thing."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOTS = [ROOT / "src/blendrag", ROOT / "integrations/blendrag-ray/blendrag_ray"]


def test_every_class_has_a_name_of_its_own():
    places = defaultdict(set)
    for path in [path for root in ROOTS for path in root.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].add(path.relative_to(ROOT).as_posix())
    assert {name: sorted(found) for name, found in places.items() if len(found) > 1} == {}
