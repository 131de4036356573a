"""The table of docs/integrations.md: which share of the retrieved tokens is reused, by framework and path.

python examples/reuse_table.py [--write docs/integrations.md]
"""

import argparse
import re
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import reuse_langchain
import reuse_llama_index

BEGIN, END = "<!-- reuse:begin -->", "<!-- reuse:end -->"
HEAD = "| framework | path | retrieved tokens reused | otherwise |\n|---|---|---|---|"


def table() -> str:
    """Measure all rows."""
    frameworks = {
        f"LangChain {version('langchain-core')}": reuse_langchain.rows,
        f"LlamaIndex {version('llama-index-core')}": reuse_llama_index.rows,
    }
    lines = [
        f"| {framework} | {path} | {share:.1%} | {note} |"
        for framework, rows in frameworks.items()
        for path, share, note in rows()
    ]
    return "\n".join([HEAD, *lines])


def write(page: Path, text: str) -> None:
    """Write ``text`` between the marks in ``page``."""
    old = page.read_text(encoding="utf-8")
    marked = re.compile(f"{BEGIN}.*?{END}", re.DOTALL)
    if not marked.search(old):
        sys.exit(f"{page} has no {BEGIN} … {END}; add them where the table belongs")
    page.write_text(marked.sub(lambda _: f"{BEGIN}\n{text}\n{END}", old), encoding="utf-8")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--write", type=Path, metavar="PAGE", help="replace the table in PAGE")
    page = arguments.parse_args().write
    measured = table()
    if page is None:
        print(measured)
    else:
        write(page, measured)
