"""The page at ``/``: what it may load and run, and its use in Debian's Chromium."""

from __future__ import annotations

import json
import re
import threading
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from typing import Any

import pytest

import scripted
from blendrag.engine import BlendEngine
from blendrag.engine.lazy_model import LazyModel
from blendrag.server.service import Limits
from blendrag.text.readers import Document
from server.conftest import ANSWER, QUESTION
from server.live import CHAT, Live, begin, live, until
from server.test_uploads import writable_engine

LONG = "word " * 60
CHATS = f"**{CHAT}"
MARKUP = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"

# -- without a browser ----------------------------------------------------------------------------


class Parts(HTMLParser):
    """Attributes, and the texts of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in self.texts:
            self.texts[self._inside].append(data)


@pytest.fixture(scope="module")
def served_page(demo_engine: BlendEngine) -> Any:
    with live(demo_engine, keys="secret") as server, server.client() as client:
        return client.get("/")  # without a key


def test_the_page_is_served_to_everybody_and_refers_to_nothing_outside(served_page) -> None:
    assert served_page.status_code == 200
    assert served_page.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"https?:|@import|url\(|//[a-z]+\.", served_page.text)
    found = Parts(served_page.text).attributes
    for name, value in found:
        assert not name.startswith("on")
        assert name not in ("style", "srcdoc", "action")
        assert name not in ("src", "href") or value.startswith("data:")
    assert ("lang", "en") in found


def test_its_headers_allow_its_own_script_and_style_and_nothing_else(served_page) -> None:
    policy = dict(
        each.split(" ", 1) for each in served_page.headers["content-security-policy"].split("; ")
    )
    for kind, (text,) in Parts(served_page.text).texts.items():
        assert (
            policy.pop(f"{kind}-src")
            == f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
        )
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    assert served_page.headers["x-content-type-options"] == "nosniff"


def test_its_script_never_makes_markup_of_text(served_page) -> None:
    (script,) = Parts(served_page.text).texts["script"]
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|write\(|DOMParser|eval|Function\(", script
    )


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio of two colours ``#rrggbb``."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(p * w for p, w in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def mixed(colour: str, percent: str, ground: str) -> str:
    share = float(percent.rstrip("%")) / 100
    parts = [
        round(share * int(colour[at : at + 2], 16) + (1 - share) * int(ground[at : at + 2], 16))
        for at in (1, 3, 5)
    ]
    return "#" + "".join(f"{part:02x}" for part in parts)


def test_texts_have_enough_contrast_in_light_and_dark(served_page) -> None:
    (style,) = Parts(served_page.text).texts["style"]
    light, dark = (
        dict(re.findall(r"--([a-z-]+): ([^;]+);", block))
        for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    )
    for colours in (light, light | dark):
        paper, ink = colours["paper"], colours["ink"]
        pairs = [(colours[name], paper) for name in ("ink", "muted", "accent", "error")]
        pairs += [(colours["muted"], colours["raised"]), (colours["on-accent"], colours["accent"])]
        for state, share in (("reused", "tint"), ("computed", "tint"), ("recomputed", "strongest")):
            pairs.append((ink, mixed(colours[state], colours[share], paper)))
        assert min(contrast(*pair) for pair in pairs) >= 4.5
        assert contrast(colours["control"], colours["raised"]) >= 3


# -- in Chromium ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Answers for at least two seconds, if nobody stops it. Lets two requests in."""
    root = tmp_path_factory.mktemp("slow") / "store"
    with scripted.engine((), root, default=LONG, mode="full") as engine:
        engine.adapter.model.pause_s = 0.02
        with live(engine, Limits(max_requests=2)) as server:
            yield server


def ask(page: Any, text: str = QUESTION) -> None:
    page.get_by_label("Question", exact=True).fill(text)
    page.keyboard.press("Enter")


def complete(page: Any, number: int = 1) -> Any:
    """The ``number``-th turn, once it is answered."""
    turn = page.locator(f".turn:nth-child({number})")
    turn.locator(".report").wait_for()
    return turn


def unlocked(page: Any, key: str) -> None:
    field = page.get_by_label("API key")
    field.fill(key)
    page.keyboard.press("Enter")
    field.wait_for(state="hidden")


def asked_of(request: Any) -> dict[str, Any]:
    return request.post_data_json


def test_a_question_typed_and_sent_by_keyboard_is_answered_with_its_sources(served, visit) -> None:
    page = visit(served)
    page.get_by_text("demo", exact=True).wait_for()
    assert page.evaluate("() => document.activeElement.id") == "question"
    page.keyboard.type(QUESTION)
    with page.expect_response(CHATS) as response:
        page.keyboard.press("Enter")
    assert asked_of(response.value.request)["retrieve"] is True
    turn = complete(page)
    about = served.engine.ask(QUESTION, explain=True)
    assert turn.locator(".answer").inner_text().strip() == about.text.strip()
    assert ANSWER in about.text
    sources = turn.locator(".sources li")
    assert sources.count() == len(about.sources)
    assert sources.first.locator(".about").inner_text().startswith("anna-bell.txt, ")
    sources.first.locator("summary").press("Enter")
    assert about.sources[0].text.strip() in sources.first.inner_text()
    (ttft_s,) = re.findall(r'"ttft_s":([\d.]+)', response.value.text())
    number, unit = turn.locator(".ttft").inner_text().split()
    assert float(number) == pytest.approx(float(ttft_s) * {"ms": 1000, "s": 1}[unit], abs=0.5)
    assert page.get_by_role("status").first.inner_text().startswith("First token after ")


def test_every_token_is_shown_with_what_became_of_it(served, visit) -> None:
    page = visit(served)
    ask(page)
    turn = complete(page)
    trace = served.engine.ask(QUESTION, explain=True).explain().trace
    turn.get_by_text("Every token of the prompt").press("Enter")
    shown = turn.locator(".prompt > span:not(.unseen)")
    found = shown.evaluate_all("all => all.map((each) => [each.className, each.textContent])")
    ranges = list(trace.ranges())
    assert found == [[each.state, each.text] for each in ranges]
    for state in ("reused", "recomputed", "computed"):
        total = sum(len(each.texts) for each in ranges if each.state == state)
        assert total
        assert turn.locator(".key li").filter(has_text=re.compile(f"^{total} {state}")).count() == 1

    at = next(number for number, each in enumerate(ranges) if each.state == "recomputed")
    said = f"recomputed in {ranges[at].layers} of {trace.layers} layers"
    tip = turn.locator(".tip")
    shown.nth(at).locator("span").first.hover()
    assert tip.inner_text() == f"token {ranges[at].start + 1}, source {ranges[at].chunk}: {said}"
    turn.locator(".prompt").focus()
    page.keyboard.press("Home")
    assert tip.inner_text().startswith("token 1:")
    for number in (2, 3, 4):
        page.keyboard.press("ArrowRight")
        assert tip.inner_text().startswith(f"token {number}")
    page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_the_time_is_shown_beside_that_of_full_prefill(served, visit) -> None:
    page = visit(served)
    ask(page)
    turn = complete(page)
    with page.expect_request(CHATS) as asked:
        turn.get_by_role("button", name="Compare with full prefill").press("Enter")
    turn.locator(".bar.full").wait_for()
    given = {"mode": "full", "trim_history": True, "explain": True}
    assert asked_of(asked.value)["blendrag"] == given
    assert "full prefill of the same prompt" in turn.locator(".sentence").inner_text()
    full = turn.locator(".full-ttft").inner_text()
    assert ANSWER in turn.locator(".other-answer").inner_text()
    ask(page, "Who is Hans Ellis?")
    sentence = complete(page, 2).locator(".sentence").inner_text()
    assert sentence.startswith(f"The last full prefill took {full} for a prompt of")


def test_a_chat_goes_on_until_a_new_one(served, visit) -> None:
    page = visit(served)
    ask(page)
    first = complete(page).locator(".answer").inner_text()
    page.get_by_label("Search the documents").uncheck()
    with page.expect_request(CHATS) as asked:
        ask(page, "And who is Hans Ellis?")
    roles = [(each["role"], each["content"]) for each in asked_of(asked.value)["messages"]]
    assert roles[0] == ("user", QUESTION)
    assert (roles[1][0], roles[1][1].strip()) == ("assistant", first.strip())
    assert roles[2:] == [("user", "And who is Hans Ellis?")]
    assert asked_of(asked.value)["retrieve"] is False
    complete(page, 2)
    page.get_by_role("button", name="New chat").click()
    with page.expect_request(CHATS) as asked:
        ask(page)
    assert len(asked_of(asked.value)["messages"]) == 1


def test_a_full_context_leaves_the_oldest_messages_out(served, visit, monkeypatch) -> None:
    monkeypatch.setattr(LazyModel, "context_tokens", 450)
    page = visit(served)
    for number in range(1, 4):
        ask(page, f"{LONG}{QUESTION}")
        complete(page, number)
    page.get_by_text("messages are left out, as the model's context is full").first.wait_for()
    with page.expect_request(CHATS) as asked:
        ask(page)
    assert len(asked_of(asked.value)["messages"]) < 7


def test_only_the_documents_that_pass_the_filter_are_searched(served, visit) -> None:
    page = visit(served)
    page.get_by_role("button", name="Filter").click()
    page.get_by_label("Only documents").fill("none.txt; anna-*")
    page.get_by_label("Where").fill("extension=.txt")
    with page.expect_request(CHATS) as asked:
        ask(page)
    given = {"only": ["none.txt", "anna-*"], "where": ["extension=.txt"], "explain": True}
    assert asked_of(asked.value)["blendrag"] == given | {"trim_history": True}
    abouts = complete(page).locator(".sources .about").all_inner_texts()
    assert [each.partition(",")[0] for each in abouts] == ["anna-bell.txt"] * len(abouts)
    page.get_by_label("Where").fill("yaer=1")
    ask(page)
    page.get_by_role("alert").filter(has_text="names the field 'yaer'").wait_for()
    page.get_by_role("button", name="Filter").click()
    with page.expect_request(CHATS) as asked:
        ask(page)
    assert asked_of(asked.value)["blendrag"] == {"trim_history": True, "explain": True}


def test_pages_of_passages_are_named(served, visit) -> None:
    chunk = {
        "chunk_id": "1",
        "source": "/d/a.pdf",
        "tokens": 5,
        "outcome": "computed",
        "reason": "new",
    }
    source = {
        "chunk_id": "1",
        "source": "/d/a.pdf",
        "file_name": "a.pdf",
        "title": "Mills",
        "text": "x",
    }
    about = {"chunks": [chunk], "sources": [{**source, "page": 3, "last_page": 4}]}
    turn = answering(visit(served), ["Yes."], ["a"], **about)
    assert turn.locator(".sources .name").inner_text() == "Mills"
    assert turn.locator(".sources .about").inner_text() == "a.pdf, pages 3–4, 5 tokens, computed"


def test_files_are_sent_listed_and_removed(tmp_path, visit) -> None:
    good, bad = tmp_path / "mill.txt", tmp_path / "bad.bin"
    good.write_text("The mill at the river was built of brick in the year 1874.")
    bad.write_bytes(b"\0\xff" * 99)
    (large := tmp_path / "large.txt").write_text("word " * 201)
    with (
        writable_engine(tmp_path / "store") as engine,
        live(engine, Limits(max_upload_bytes=1000), keys="editor write\nreader") as server,
    ):
        engine.ingest([Document(f"{MARKUP}{i}.jsonl#{i % 2}", f"Note {i}", "") for i in (1, 1)])
        page = visit(server)
        unlocked(page, "editor")
        page.get_by_role("button", name="Documents").click()
        page.get_by_label("Add files").wait_for()  # the page knows the limit of the server then
        page.get_by_label("Add files").set_input_files([large, good, bad])
        uploads, documents = page.locator("#uploads li"), page.locator("#list li")
        uploads.filter(has_text="mill.txt").filter(has_text="stored").wait_for()
        failed = uploads.filter(has_text="bad.bin").filter(has_text="failed")
        assert failed.locator(".error").inner_text().startswith("Is binary, expected text")
        documents.nth(1).wait_for()
        said = page.locator("#documents-error").inner_text()
        assert said == "large.txt is larger than 1,000 bytes, the limit of this server."
        assert [each.source for each in engine.require_corpus().documents()][1:] == ["mill.txt"]
        page.get_by_label("Find a document").fill("MILL")
        assert documents.all_inner_texts()[0].split("\n")[0] == "mill.txt"
        remove = page.get_by_role("button", name="Remove mill.txt")
        remove.click()
        assert len(engine.require_corpus().documents()) == 2
        remove.click()
        page.get_by_text("0 documents.").wait_for()
        assert len(engine.require_corpus().documents()) == 1
        page.get_by_role("button", name="Change key").click()
        unlocked(page, "reader")
        page.get_by_label("Find a document").fill("")
        documents.first.wait_for()
        assert documents.count() == 1
        page.get_by_label("Add files").wait_for(state="hidden")
        documents.get_by_role("button").first.wait_for(state="detached")


def test_a_file_that_is_dropped_beside_the_documents_is_not_opened(served, visit) -> None:
    opened = """(text) => {
        const dataTransfer = new DataTransfer();
        dataTransfer.items.add(text ? "text" : new File(["a"], "a.txt"), ...(text ? ["text/plain"] : []));
        const drop = new DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer });
        return document.body.dispatchEvent(drop);
    }"""
    page = visit(served)
    assert page.evaluate(opened, False) is False
    assert page.evaluate(opened, True) is True  # into the question


def test_an_answer_streams_and_stops_on_the_server_too(slow, visit, monkeypatch) -> None:
    model, before = slow.engine.adapter.model, slow.service.admission.outcomes["cancelled"]
    monkeypatch.setattr(model, "default", "word " * 2900)
    for_minutes = replace(slow.engine.settings, max_new_tokens=3000)
    monkeypatch.setattr(slow.engine.kv_namespace.corpus, "settings", for_minutes)
    page = visit(slow)
    page.get_by_label("Search the documents").uncheck()
    for stop in (
        lambda: page.get_by_role("button", name="Stop").press("Enter"),
        lambda: page.keyboard.press("Escape"),
    ):
        began = model.forwards
        ask(page, "Hello")
        answer = page.locator(".turn:last-child .answer")
        answer.filter(has_text="word").wait_for()
        assert answer.get_attribute("aria-busy") == "true"
        assert slow.engine.scheduler.requests.counts[1] == 1
        stop()
        page.locator(".turn:last-child .ending").filter(has_text="Stopped.").wait_for()
        slow.settled()
        slow.engine.drain()
        assert 0 < answer.inner_text().count("word") < 2900
        assert model.forwards < began + 2900
        assert page.get_by_role("button", name="Ask").is_visible()
    assert slow.service.admission.outcomes["cancelled"] == before + 2


def test_what_documents_models_and_servers_say_is_text(tmp_path, visit) -> None:
    with scripted.engine((), tmp_path / "store", default=MARKUP) as engine:
        engine.ingest(
            [Document(source=f"/{MARKUP}", text=f"{MARKUP} is a text.", title=MARKUP)]
        ).whole()
        with live(engine) as server:
            page = visit(server)
            ask(page, MARKUP)
            turn = complete(page)
            assert turn.locator("h2").inner_text() == MARKUP
            assert turn.locator(".answer").inner_text() == MARKUP
            assert turn.locator(".sources .name").inner_text() == MARKUP
            turn.locator(".sources summary").click()
            turn.get_by_text("Every token of the prompt").click()
            assert MARKUP in turn.locator(".sources p").first.inner_text()
            assert MARKUP in turn.locator(".prompt").inner_text()
            page.route(
                CHATS, lambda route: route.fulfill(status=400, json={"error": {"message": MARKUP}})
            )
            ask(page, "Hello")
            page.get_by_role("alert").filter(has_text=MARKUP).wait_for()
            assert page.title() == "blendrag"
            assert page.locator("img").count() == 0


def test_a_key_is_asked_for_and_kept_in_the_tab_only(demo_engine, visit) -> None:
    with live(demo_engine, keys="schlüssel") as server:
        page = visit(server)
        field = page.get_by_label("API key")
        field.fill("other")
        page.keyboard.press("Enter")
        page.get_by_role("alert").filter(has_text="is not one of this server").wait_for()
        field.fill("schlüssel")
        page.keyboard.press("Enter")
        field.wait_for(state="hidden")
        ask(page)
        complete(page)
        page.reload()
        ask(page)
        complete(page)
        stores = "() => [localStorage.length, document.cookie, location.search]"
        assert page.evaluate(stores) == [0, "", ""]
        page.get_by_role("button", name="Change key").click()
        assert field.is_visible()
        assert page.evaluate("() => sessionStorage.getItem('blendrag-key')") == ""


def test_the_chosen_model_is_asked_with_a_new_key_too(demo_engine, visit) -> None:
    models = {"data": [{"id": name, "max_model_len": 9} for name in ("one", "two")]}
    with live(demo_engine, keys="first\nsecond") as server:
        page = visit(server)
        page.route("**/v1/models", lambda route: route.fulfill(json=models))
        unlocked(page, "first")
        choice = page.get_by_label("Answer with")
        choice.select_option("two")
        page.get_by_role("button", name="Change key").click()
        unlocked(page, "second")
        choice.filter(visible=True).wait_for()
        with page.expect_request(CHATS) as asked:
            ask(page)
        assert asked_of(asked.value)["model"] == choice.input_value() == "two"


@pytest.mark.slow
def test_a_full_queue_says_when_to_ask_again(slow, visit) -> None:
    page = visit(slow)
    page.get_by_label("Search the documents").uncheck()
    requests, go_on = slow.engine.scheduler.requests, threading.Event()
    with slow.engine.adapter.model.register_forward_pre_hook(lambda *_: go_on.wait(60) and None):
        held = [begin(slow) for _ in range(2)]
        until(lambda: len(requests) == 2)
        ask(page, "Hello")
        said = page.get_by_role("alert").filter(has_text="Ask again in 2 seconds").inner_text()
        assert said.startswith("The server is busy.")
        for connection in held:
            connection.close()
        go_on.set()
        slow.settled()
    assert page.get_by_label("Question", exact=True).input_value() == "Hello"
    page.keyboard.press("Enter")
    complete(page, 2)


def test_a_server_that_is_gone_is_named(served, visit) -> None:
    half = 'data: {"choices": [{"index": 0, "delta": {"content": "half an"}}]}\n\n'
    replies = [
        lambda route: route.abort(),
        lambda route: route.fulfill(body=half, content_type="text/event-stream"),
        lambda route: route.continue_(),
    ]
    page = visit(served)
    page.route(CHATS, lambda route: replies.pop(0)(route))
    ask(page)
    page.get_by_role("alert").filter(has_text=f"no answer from 127.0.0.1:{served.port}").wait_for()
    page.keyboard.press("Enter")  # the question is there again
    turn = page.locator(".turn:nth-child(2)")
    turn.get_by_role("alert").filter(has_text="ended before the answer was complete").wait_for()
    assert turn.locator(".answer").inner_text() == "half an"
    with page.expect_request(CHATS) as asked:
        page.keyboard.press("Enter")
    assert len(asked_of(asked.value)["messages"]) == 1  # what failed is no part of the chat
    complete(page, 3)


def test_it_fits_a_narrow_screen_in_light_and_dark(served, visit) -> None:
    page = visit(served, 360, 640)
    ask(page)
    turn = complete(page)
    turn.get_by_text("Every token of the prompt").click()
    for summary in turn.locator(".sources summary").all():
        summary.click()
    assert page.evaluate("() => document.documentElement.scrollWidth") == 360
    shades = {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        ground = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        shades[scheme] = sum(map(int, re.findall(r"\d+", ground)))
    assert shades["light"] > 600
    assert shades["dark"] < 150


#: Of documents, names, models and servers: markup, links, directions, escapes, controls, and long words.
HOSTILE = (
    f"{MARKUP} </script><svg onload=\"document.title='run'\"> javascript:document.title='run' "
    "[x](javascript:alert(1)) \u202eevil\u202c \u200b\u200d\ufeff \x1b]0;run\x07\x1b[2J \0 العربية "
) + "W" * 2_000


def streamed(pieces: list[str], texts: list[str], **changes: Any) -> str:
    """A stream of an answer over a prompt of the tokens ``texts``, about which everything is hostile but
    ``changes``."""
    chunk = {
        "chunk_id": "1",
        "source": HOSTILE,
        "tokens": 5,
        "outcome": "reused",
        "reason": HOSTILE,
    }
    about = {
        "ttft_s": 0.5,
        "mode": "blend",
        "prompt_tokens": len(texts),
        "decision": HOSTILE,
        "notes": [HOSTILE],
        "chunks": [{**chunk, "recomputed_tokens": 1}],
        "sources": [
            {
                "chunk_id": "1",
                "title": HOSTILE,
                "text": HOSTILE,
                "source": HOSTILE,
                "file_name": HOSTILE,
            }
        ],
        "explanation": {
            "layers": 4,
            "ranges": [{"start": 0, "state": "computed", "layers": 0, "chunk": 1, "texts": texts}],
        },
        **changes,
    }
    choices = [{"index": 0, "delta": {"content": piece}} for piece in pieces]
    events = [{"choices": [each]} for each in choices] + [
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "blendrag": about}
    ]
    return (
        ": ping\n\n"
        + "".join(f"data: {json.dumps(each)}\n\n" for each in events)
        + "data: [DONE]\n\n"
    )


def answering(page: Any, pieces: list[str], texts: list[str], **changes: Any) -> Any:
    """The turn of a question that is answered so."""
    body = streamed(pieces, texts, **changes)
    page.route(CHATS, lambda r: r.fulfill(body=body, content_type="text/event-stream"))
    ask(page, HOSTILE[:300].replace("\0", ""))
    return complete(page)


def test_hostile_text_runs_nothing_and_fits(served, visit) -> None:
    page = visit(served, 360, 800)
    turn = answering(page, [HOSTILE], [HOSTILE[:200], HOSTILE])
    turn.get_by_text("Every token of the prompt", exact=True).click()
    turn.locator(".sources summary").click()
    turn.locator(".prompt .computed span").first.hover()
    assert page.title() == "blendrag"
    assert page.locator(".turn img, .turn svg, .turn script, .turn a, iframe").count() == 0
    for width in (360, 1200):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("() => document.documentElement.scrollWidth") == width
    assert turn.locator(".answer").evaluate("each => each.textContent.length") == len(HOSTILE)


def test_many_pieces_are_shown_once_a_frame(served, visit) -> None:
    """Each piece shown alone took as long as the answer before it."""
    page = visit(served)
    page.evaluate(
        """() => {
            window.changes = 0;
            const ofAnswers = (each) => each.target.matches?.(".answer");
            const seen = (all) => { window.changes += all.filter(ofAnswers).length; };
            const chat = document.getElementById("chat");
            new MutationObserver(seen).observe(chat, { childList: true, subtree: true });
        }"""
    )
    turn = answering(page, ["word "] * 1500, ["a"])
    shown = turn.locator(".answer").evaluate("each => each.textContent")
    assert shown == "word " * 1500
    assert page.evaluate("() => window.changes") < 300


def test_whitespace_before_an_answer_is_not_shown_but_kept(served, visit) -> None:
    page = visit(served)
    turn = answering(page, ["\n", " Yes", ".\n", "  No."], ["a"])
    assert turn.locator(".answer").evaluate("each => each.textContent") == "Yes.\n  No."
    with page.expect_request(CHATS) as asked:
        ask(page, "Sure?")
    assert asked_of(asked.value)["messages"][1]["content"] == "\n Yes.\n  No."


def test_tokens_are_made_when_they_are_looked_at(served, visit) -> None:
    page = visit(served)
    turn = answering(page, ["Yes."], ["a "] * 3_000)
    elements = "() => document.querySelectorAll('*').length"
    assert page.evaluate(elements) < 1000
    turn.get_by_text("Every token of the prompt", exact=True).click()
    assert page.evaluate(elements) > 3_000
    turn.get_by_text("Every token of the prompt", exact=True).click()
    turn.get_by_text("Every token of the prompt", exact=True).click()
    assert turn.locator(".prompt .computed").count() == 1


def test_a_page_of_another_site_cannot_make_the_server_work(served, tab) -> None:
    page = tab
    page.route("http://evil.example/", lambda r: r.fulfill(body="<p>", content_type="text/html"))
    page.goto("http://evil.example/")
    before = sum(served.service.admission.outcomes.values())
    sent = page.evaluate(
        """async (url) => {
            const body = JSON.stringify({ messages: [{ role: "user", content: "work" }] });
            const post = (body, headers, mode) => fetch(url, { method: "POST", mode, headers, body })
                .then((reply) => reply.type, () => "refused");
            const sent = [
                await post(body, { "Content-Type": "text/plain" }, "no-cors"),
                await post(new Blob([body]), {}, "no-cors"),
                await post(body, { "Content-Type": "application/json" }, "cors"),
            ];
            navigator.sendBeacon(url, body);
            return sent;
        }""",
        f"{served.url}{CHAT}",
    )
    page.unroute_all()
    page.goto("about:blank")
    assert set(sent) <= {"opaque", "refused"}
    with served.client() as client:  # after what was sent
        client.get("/health")
    assert sum(served.service.admission.outcomes.values()) == before
