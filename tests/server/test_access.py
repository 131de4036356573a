"""Bearer keys: who may ask and who may write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

import tiny
from blendrag.engine import BlendEngine
from blendrag.server.access import AccessControlMiddleware, ApiKeys, checked_hosts
from server.live import Live, live

KEYS = "# readers\nreader-1\n\nreader-2\nlire-voilà\n# editors\neditor-1 write\n"


@pytest.fixture(scope="module")
def guarded(demo_engine: BlendEngine) -> Iterator[Live]:
    with live(demo_engine, keys=KEYS) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "header",
    [
        None,
        "Bearer reader-3",
        "Bearer reader",
        "Bearer",
        "Basic reader-1",
        "Bearer #",
        "Bearer write",
        "Bearer re\u00e4der",
        "reader-1",
    ],
)
def test_without_a_known_key_nothing_below_v1_answers(guarded: Live, header) -> None:
    with guarded.client() as client:
        headers = {} if header is None else {"Authorization": header.encode("latin-1")}
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions")):
            response = client.request(method, path, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"


def test_known_keys_may_ask(guarded: Live) -> None:
    with openai.OpenAI(base_url=guarded.v1, api_key="reader-1", max_retries=0) as client:
        assert client.models.list().data
    with guarded.client() as client:
        for key in ("reader-2", "editor-1", "lire-voilà"):
            headers = {"Authorization": f"Bearer {key}".encode()}
            assert client.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "text/plain",
        "text/plain; application/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "text/json",
        "application/jsonx",
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_no_web_page_can_make_a_server_without_keys_work(kind: str | None, chunked: bool) -> None:
    """What a browser sends to another site without asking it is refused before an application sees it."""
    reached = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["headers"])

    content = b'{"messages": [{"role": "user", "content": "work"}]}'
    headers = {} if kind is None else {"Content-Type": kind}
    client = TestClient(
        AccessControlMiddleware(application, ApiKeys(), 1 << 20), "http://localhost"
    )
    body: Any = iter([content]) if chunked else content
    reply = client.post("/v1/chat/completions", content=body, headers=headers)
    assert reply.status_code == 415
    assert "expected application/json" in reply.json()["error"]["message"]
    assert "access-control-allow-origin" not in reply.headers
    assert not reached


def test_a_browser_that_asks_first_is_told_nothing(served: Live) -> None:
    asks = {
        "Origin": "http://evil.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    with served.client() as client:
        for path in ("/v1/chat/completions", "/v1/ingest", "/v1/documents", "/"):
            reply = client.options(path, headers=asks)
            assert reply.status_code == 405
            assert not [name for name in reply.headers if name.startswith("access-control")]
        reply = client.get("/v1/models", headers={"Origin": "http://evil.example"})
        assert not [name for name in reply.headers if name.startswith("access-control")]


def test_health_and_metrics_need_no_key(guarded: Live) -> None:
    with guarded.client() as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/metrics").status_code == 200


def test_only_keys_that_may_write_change_documents(guarded: Live, served: Live) -> None:
    new = {"documents": [{"source": "x", "text": "y"}]}
    asked = (("POST", "/v1/ingest", {"json": new}), ("DELETE", "/v1/documents?source=x", {}))
    for server, headers, code in (
        (guarded, bearer("reader-1"), "read_only_key"),
        (served, {}, "read_only_server"),
    ):
        with server.client(headers=headers) as client:
            for method, path, more in asked:
                response = client.request(method, path, **more)
                assert response.status_code == 403
                assert response.json()["error"]["code"] == code
            assert client.get("/v1/documents").status_code == 200


def test_keys_do_not_show_in_texts() -> None:
    assert "editor-1" not in repr(ApiKeys.parse(KEYS, "keys"))


def test_without_keys_a_web_page_cannot_take_this_machines_name(
    served: Live, guarded: Live
) -> None:
    names = (
        "rebound.example.org", "rebound.example.org:8000", "127.0.0.1.example.org.", "local.example.org",
        "host.docker.internal.example.org", "evillocal.com", "mybox.lan",
    )  # fmt: skip
    with served.client() as client, guarded.client(headers=bearer("reader-1")) as known:
        for host in names:
            for path in ("/", "/v1/models", "/metrics"):
                response = client.get(path, headers={"Host": host})
                assert response.status_code == 403
                assert response.json()["error"]["code"] == "host_not_allowed"
            assert known.get("/v1/models", headers={"Host": host}).status_code == 200
        for host in (
            "localhost:8000",
            "LOCALHOST",
            "app.localhost",
            "127.0.0.1",
            "[::1]:8000",
            "10.0.0.7",
            "machine",
            "host.docker.internal:8000",
            "gateway.docker.internal",
            "My-Mac.local.",
            "box.home.arpa",
        ):
            assert client.get("/v1/models", headers={"Host": host}).status_code == 200


def test_further_names_are_allowed_by_an_option_that_the_refusal_names(demo_engine) -> None:
    with live(demo_engine, hosts=checked_hosts(["MyBox.lan"])) as server, server.client() as client:
        for host in ("mybox.lan", "MYBOX.lan:8000", "mybox.lan."):
            assert client.get("/health", headers={"Host": host}).status_code == 200
        refused = client.get("/health", headers={"Host": "your.mybox.lan"})
        assert refused.status_code == 403
        assert "--allow-host your.mybox.lan" in refused.json()["error"]["message"]


@pytest.mark.parametrize("name", ["https://a.example", "a.example:80", "*", "*.example", "", "a b"])
def test_what_is_no_name_is_refused_in_one_sentence(name: str) -> None:
    with tiny.refuses("--allow-host .* must be a name without scheme and port"):
        checked_hosts([name])


def test_a_slash_at_the_end_of_a_path_is_no_redirect_to_the_host_of_the_request(
    served: Live,
) -> None:
    with served.client() as client:
        for path in ("/health", "/v1/models", "/v1/documents", "/metrics", "/openapi.json"):
            told = client.get(f"{path}/", headers={"Host": "evil"})
            assert (told.status_code, told.headers.get("location")) == (200, None)
        assert client.post("/v1/ingest/", json={"documents": []}).status_code == 403
        assert client.get("/nowhere/").status_code == 404
