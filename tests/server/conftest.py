"""The embedded model over a part of its corpus, served on a free port.

torch is imported in the fixtures: the process that deals tests to workers reads this file, too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from blendrag.demo import demo_corpus_path

if TYPE_CHECKING:
    from blendrag.engine import BlendEngine
    from server.live import Live

FILES = ("anna-bell.txt", "hans-ellis.txt", "apple-festival.txt")
QUESTION = "Which sport does Anna Bell enjoy?"
ANSWER = "skating"


@pytest.fixture(scope="session")
def demo_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    import tiny
    from blendrag.engine import BlendEngine

    root = tmp_path_factory.mktemp("served") / "store"
    with BlendEngine("demo", root, chunk_tokens=64, max_new_tokens=12, learn=False) as engine:
        engine.kv_namespace.corpus.__dict__["embedder"] = tiny.WordEmbedder()
        engine.ingest([demo_corpus_path() / name for name in FILES]).whole()
        yield engine


@pytest.fixture(scope="session")
def served(demo_engine: BlendEngine) -> Iterator[Live]:
    from server.live import live

    with live(demo_engine) as server:
        yield server


@pytest.fixture(scope="session")
def context(demo_engine: BlendEngine) -> str:
    """All chunks about Anna Bell."""
    corpus = demo_engine.require_corpus()
    (source,) = [each.source for each in corpus.documents() if "anna-bell" in each.source]
    return "\n\n".join(chunk.text for chunk in corpus.chunks_of(source))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("Chromium is not installed; on Debian: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def tab(chromium: Any) -> Any:
    """Chromium starts a process for each new one."""
    page = chromium.new_page()
    page.set_default_timeout(120_000)
    return page


@pytest.fixture
def visit(tab: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page of a server in a window of that size, as in a new tab. Fails if something was requested
    elsewhere, or a script failed."""
    wrong: list[str] = []
    allowed = ["data:"]
    watching = {
        "pageerror": lambda error: wrong.append(str(error)),
        "request": lambda r: r.url.startswith(tuple(allowed)) or wrong.append(r.url),
        "console": lambda m: "Content Security Policy" in m.text and wrong.append(m.text),
    }
    for event, watch in watching.items():
        tab.on(event, watch)

    def opened(server: Live, width: int = 1280, height: int = 720) -> Any:
        allowed.append(server.url)
        tab.set_viewport_size({"width": width, "height": height})
        tab.emulate_media(color_scheme=None)
        tab.mouse.move(0, 0)
        tab.goto(server.url)
        return tab

    yield opened
    for event, watch in watching.items():
        tab.remove_listener(event, watch)
    tab.unroute_all(behavior="ignoreErrors")
    if tab.url.startswith("http"):
        tab.evaluate("() => sessionStorage.clear()")
        tab.goto("about:blank")
    assert wrong == []
