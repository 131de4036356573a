"""Pages of the site (``make docs``) that are not files of ``docs/``, and links that leave it.

README.md is the site's first page, CHANGELOG.md one of its last; the reference is made of docstrings. A
link to another file of the repository, which the site does not hold, becomes the name of the file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
REFERENCE = {
    "engine": (
        "blendrag.engine.BlendEngine",
        "blendrag.engine.Options",
        "blendrag.engine.Answer",
        "blendrag.metrics",
    ),
    "programs": ("blendrag.schema.programs",),
    "errors": ("blendrag.errors",),
    "langchain": ("langchain_blendrag",),
    "llama_index": ("llama_index.llms.blendrag",),
}
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):\s*(?=<code)")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    for page, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    for page, names in REFERENCE.items():
        text = "\n\n".join(f"::: {name}" for name in names)
        files.append(File.generated(config, f"reference/{page}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Raises :class:`PluginError` for a link to a file that does not exist."""
    at = page.file.src_uri
    folder = "." if at in PAGES else posixpath.join("docs", posixpath.dirname(at))

    def outside(link: re.Match[str]) -> str:
        text, target, anchor = link.groups()
        inside = posixpath.normpath(posixpath.join(posixpath.dirname(at), target))
        if files.get_file_from_path(inside):
            return link.group()
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in PAGES.values():
            there = next(name for name, source in PAGES.items() if source == path)
            back = posixpath.relpath(there, posixpath.dirname(at) or ".")
            return f"[{text}]({back}{anchor or ''})"
        if not (ROOT / path).exists():
            raise PluginError(f"{at} links to {target}, and there is no {path}")
        return text if path in text else f"{text} (`{path}`)"

    return LINK.sub(outside, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Docstrings name what they refer to with Sphinx' roles, which Markdown does not have."""
    return ROLE.sub("", html)
