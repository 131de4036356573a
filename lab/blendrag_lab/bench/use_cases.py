"""Prompts of modules: some at random, and Prompt Cache's three use cases (§5.6), all of random words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

FILES = ("unit.py", "map.py", "player.py", "game.py", "database.py")
#: Features of a learner, each a union of this many traits.
FEATURES = ("level", "proficiency", "history", "style", "assessment", "motivation")
TRAITS = 5
CITIES = ("maldives", "rome", "tokyo", "sydney")
#: Longest argument of the trip.
ARGUMENT_TOKENS = 8


@dataclass(frozen=True)
class UseCase:
    """What is inside ``<schema>``, and what a prompt imports of it."""

    name: str
    schema: str
    imports: str


def use_cases(words: Callable[[int], str], modules: int, module_tokens: int) -> Iterator[UseCase]:
    """``words``: random words of so many tokens. Files and cities have ``module_tokens``, traits a fourth."""

    def module(name: str, tokens: int, more: str = "") -> str:
        return f'<module name="{name}">{escape(words(tokens))}{more}</module>'

    def union(members: Iterable[str]) -> str:
        return f"<union>{''.join(members)}</union>"

    def parameter(name: str) -> str:
        return f' <param name="{name}" len="{ARGUMENT_TOKENS}"/>'

    names = [f"m{i}" for i in range(modules)]
    yield UseCase(
        f"{modules} modules",
        "".join(module(name, module_tokens) for name in names),
        "".join(f"<{name}/>" for name in names),
    )
    yield UseCase(
        "code generation",
        "".join(module(name, module_tokens) for name in FILES),
        "".join(f"<{name}/>" for name in FILES if name != "map.py"),
    )
    few = module_tokens // 4
    features = (union(module(f"{feature}-{i}", few) for i in range(TRAITS)) for feature in FEATURES)
    yield UseCase(
        "personalisation",
        "".join(features),
        "".join(f"<{feature}-{i % TRAITS}/>" for i, feature in enumerate(FEATURES)),
    )
    cities = union(module(city, module_tokens) for city in CITIES)
    kinds = (module("domestic", few, parameter("city")), module("overseas", few, cities))
    yield UseCase(
        "trip plan",
        module("travel-plan", few, parameter("duration") + union(kinds)),
        '<travel-plan duration="three days"><overseas><rome/></overseas></travel-plan>',
    )
