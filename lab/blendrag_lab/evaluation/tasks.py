"""Cases made from what is on every machine: the same for the same seed, tokenizer and version of Python."""

from __future__ import annotations

import ast
import random
import re
import string
import sysconfig
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

from blendrag.demo import Question, handbook_path, handbook_questions
from blendrag.errors import InvalidInputError
from blendrag.model.tokens import Tokens
from blendrag.text.chunking import Chunker
from blendrag_lab.evaluation.datasets import Case, Dataset, Metric, Turn, spread

#: Kind, question, answer.
Asked = tuple[str, str, str]
#: What is asked, over which chunks, after which turns.
Made = tuple[Asked, list[str], list[Turn]]

#: In bytes; larger ones take seconds to cut.
LARGEST_MODULE = 40_000
#: Defaults that a model guesses without the code.
GUESSED = ("", "None", "True", "False")
#: What weather stations measure, and the most of it in a year.
MEASURED = {"mm of rain": 2000, "hours of sun": 3000, "days of frost": 200}
TURNS = 3


def make_task(
    name: str, tokens: Tokens, seed: int, n_cases: int, n_chunks: int, chunk_tokens: int
) -> Dataset:
    """Cases of the task ``name``: ``n_chunks`` chunks of at most ``chunk_tokens`` tokens each."""
    chunker = Chunker(tokens.text, chunk_tokens)
    cases: list[Case] = []
    for asked, chunks, history in TASKS[name](random.Random(f"{name}/{seed}"), chunker, n_chunks):
        (kind, question, answer), where = asked, f"{name}/{seed}/{len(cases)}"
        case = Case(where, where, kind, question, (answer,), tuple(chunks), tuple(history))
        cases.append(case)
        if len(cases) == n_cases:
            metric: Metric = "rouge_l" if name == "long" else "f1"
            return Dataset(name, metric, tuple(cases), n_chunks, chunk_tokens)
    raise InvalidInputError(
        f"{n_cases} cases of {n_chunks} chunks of {chunk_tokens} tokens are more than the {len(cases)} that "
        f"the texts of {name} give; take fewer --contexts or --chunks, or other --chunk-tokens"
    )


def _code(rng: random.Random, chunker: Chunker, n: int) -> Iterator[Made]:
    found = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    modules = [path for path in found if path.stat().st_size < LARGEST_MODULE]
    chunks_of = lru_cache(None)(lambda path: _module_chunks(path, chunker))
    while True:
        cut = filter(None, map(chunks_of, rng.sample(modules, len(modules))))
        chosen = [rng.choice(chunks) for chunks in islice(cut, n)]
        if len(chosen) < n:
            return
        questions = [asked for _, on_it in chosen for asked in on_it]
        if questions:
            kind = rng.choice(sorted({asked[0] for asked in questions}))
            asked = rng.choice([asked for asked in questions if asked[0] == kind])
            yield asked, [text for text, _ in chosen], []


def _module_chunks(path: Path, chunker: Chunker) -> list[tuple[str, list[Asked]]]:
    """Chunks of at least half the largest size, each after the module's name, with what can be asked."""
    source = path.read_text(encoding="utf-8")
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    lines, found = source.splitlines(), []
    for piece in chunker.split(source):
        text = f"# {path.name}\n\n{piece.text}"
        if chunker.chunk_tokens // 2 <= chunker.count(text) <= chunker.chunk_tokens:
            whole = [f for f in functions if "\n".join(lines[f.lineno - 1 : f.end_lineno]) in text]
            public = [f for f in whole if not f.name.startswith("_") and f.name != "main"]
            found.append((text, [asked for f in public for asked in _asked_of(f, path.stem)]))
    return found


def _asked_of(function: ast.FunctionDef, module: str) -> Iterator[Asked]:
    name, given = f"the function {function.name}", function.args
    yield "module", f"Which module defines {name}?", module
    for parameter, default in zip(given.args[::-1], given.defaults[::-1], strict=False):
        answer = str(default.value) if isinstance(default, ast.Constant) else ""
        if answer.strip(string.punctuation + " ") not in GUESSED:
            yield "default", f"What is the default of {parameter.arg} in {name}?", answer
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    if len(returned) == 1 and isinstance(returned[0], ast.Name | ast.Attribute | ast.Call):
        yield "returns", f"Which expression does {name} return?", ast.unparse(returned[0])


def _long(rng: random.Random, chunker: Chunker, n: int) -> Iterator[Made]:
    chunks = [chunk.text for chunk in chunker.split("\n\n".join(_handbook().values()))]
    starts = range(len(chunks) - n + 1)
    for start in rng.sample(starts, len(starts)):
        taken = chunks[start : start + n]
        leads = [re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0] for text in taken]
        yield ("summary", "", " ".join(leads)), taken, []


def _tables(rng: random.Random, chunker: Chunker, n: int) -> Iterator[Made]:
    while True:
        years, stations = rng.sample(range(1900, 1930 + n), n), rng.sample(range(100, 1000), 400)
        weather = {
            year: {each: [rng.randrange(most) for most in MEASURED.values()] for each in stations}
            for year in years
        }
        tables = [_table(year, weather[year], chunker) for year in years]
        shared = stations[: min(table.count("\n") for table in tables) - 3]
        if not shared:
            return
        station, (column, name) = rng.choice(shared), rng.choice([*enumerate(MEASURED)])
        years = [years[0], years[-1]]
        one, other = (weather[year][station][column] for year in years)
        asked = ("look-up", f"How many {name} did station {station} have in {years[0]}?", str(one))
        if one != other and rng.random() < 0.5:
            text = (
                f"In which year did station {station} have more {name}, {years[0]} or {years[1]}?"
            )
            asked = ("comparison", text, str(years[one < other]))
        yield asked, rng.sample(tables, n), []


def _table(year: int, values: Mapping[int, Sequence[int]], chunker: Chunker) -> str:
    lines = [
        f"## Weather in {year}",
        "",
        f"| station | {' | '.join(MEASURED)} |",
        "|---|---|---|---|",
    ]
    lines += [f"| {station} | {' | '.join(map(str, row))} |" for station, row in values.items()]
    tables = ["\n".join(lines[:count]) for count in range(1, len(lines) + 1)]
    return tables[bisect_right(tables, chunker.chunk_tokens, key=chunker.count) - 1]


def _chat(rng: random.Random, chunker: Chunker, n: int) -> Iterator[Made]:
    pages, parts = _handbook(), spread(range(n), min(TURNS, n))
    text = "\n\n".join(pages.values())
    chunks = [each for each in chunker.split(text) if len(each.text) > 80]  # no heading alone

    def home(question: Question) -> int:
        """The chunk with its answer, or after the heading with it."""
        at = text.index(question.answer, text.index(pages[question.document_id]))
        return next(i for i, chunk in enumerate(chunks) if at < chunk.end)

    while n <= len(chunks):
        questions = rng.sample(handbook_questions(), len(parts))
        homes = [home(question) for question in questions]
        if len({*homes}) < len(homes):
            continue
        places, kind = [rng.choice(part) for part in parts], "latest"
        if len(parts[0]) > 1 and rng.random() < 0.5:
            places[-1], kind = rng.choice([i for i in parts[0] if i != places[0]]), "earlier"
        taken = rng.sample(sorted({*range(len(chunks))} - {*homes}), n - len(homes))
        for place, chunk in sorted(zip(places, homes, strict=True)):
            taken.insert(place, chunk)
        *history, (last, answer) = [(question.text, question.answer) for question in questions]
        yield (kind, last, answer), [chunks[i].text for i in taken], history


def _handbook() -> dict[str, str]:
    """Pages by name, in order."""
    pages = sorted(handbook_path().glob("*.md"))
    return {page.stem: page.read_text(encoding="utf-8").strip() for page in pages}


TASKS: dict[str, Callable[[random.Random, Chunker, int], Iterator[Made]]] = {
    "code": _code, "long": _long, "tables": _tables, "chat": _chat,
}  # fmt: skip
