"""The routes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp

from blendrag.config import DEFAULT_EMBEDDER
from blendrag.corpus.embedding_turns import Check
from blendrag.engine.exposition import joined
from blendrag.server.access import AccessControlMiddleware, require_writer
from blendrag.server.bodies import ChatBody, CompletionBody, EmbeddingBody, IngestBody
from blendrag.server.chats import chat_chunks, chat_completion
from blendrag.server.completions import completion, completion_chunks
from blendrag.server.cross_origin import CrossOriginMiddleware
from blendrag.server.documents import delete_documents, document_list, documents_of, ingest
from blendrag.server.embeddings import embeddings, is_short, texts_of
from blendrag.server.events import streamed, while_connected
from blendrag.server.page import page
from blendrag.server.refusals import install_refusals
from blendrag.server.replies import Fields
from blendrag.server.service import Service
from blendrag.server.services import Services
from blendrag.store.server_record import MAX_CHALLENGE_CHARS

#: Content type of Prometheus' text format.
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def create_app(service: Service, *others: Service) -> ASGIApp:
    """The ASGI application; the caller opens and closes the engines. ``others`` were made with
    :meth:`Service.beside`."""

    @asynccontextmanager
    async def serving(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="blendrag", docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=serving
    )
    most = service.limits.max_body_bytes
    app.add_middleware(
        AccessControlMiddleware, keys=service.keys, max_body_bytes=most, hosts=service.hosts
    )
    install_refusals(app)
    services = Services(service, *others)

    def require_writable(model: str | None = None) -> None:
        service.check_open()
        services.of(model).check_writable()

    writers = [Depends(require_writer), Depends(require_writable)]

    async def answer(body: Any, request: Request, whole: Any, chunks: Any) -> Response:
        chosen = services.of(body.model)
        body.sent_by(request.state.tenant)
        if body.stream:
            return await streamed(request, chunks(chosen, body))
        return JSONResponse(await while_connected(request, whole(chosen, body)))

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        return await answer(body, request, chat_completion, chat_chunks)

    @app.post("/v1/completions")
    async def complete(body: CompletionBody, request: Request) -> Response:
        return await answer(body, request, completion, completion_chunks)

    @app.post("/v1/embeddings")
    async def embed(body: EmbeddingBody, request: Request) -> Response:
        texts = texts_of(body)

        def work(check: Check) -> tuple[bytes, int]:
            chosen = services.of_embedder(body.model, check)
            return embeddings(chosen.engine, texts, body, chosen.embedder_id, check)

        threads = service.questions if is_short(texts) else service.embeddings
        written, tokens = await while_connected(request, service.worked(work, threads))
        service.admission.note_embedded(len(texts), tokens)
        return _json(written)

    async def embedder_ids() -> dict[str, None]:
        ids: dict[str, None] = {}
        for each in services:
            given = each.engine.settings.embedder or DEFAULT_EMBEDDER
            ids[
                await each.read_or_last("embedder", partial(getattr, each, "embedder_id"), given)
            ] = None
        return ids

    @app.get("/v1/models")
    async def models() -> Fields:
        embedders = [_model(service, name) for name in await embedder_ids()]
        return {"object": "list", "data": [*map(_language_model, services), *embedders]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Fields:
        if name in await embedder_ids():
            return _model(service, name)
        return _language_model(services.of(name))

    @app.post("/v1/ingest", dependencies=writers)
    async def add(body: IngestBody, request: Request, model: str | None = None) -> Fields:
        engine = services.of(model).engine
        work = service.worked(lambda check: ingest(engine, body, check), service.changes)
        return await while_connected(request, work)

    @app.get("/v1/documents")
    async def listing(request: Request, model: str | None = None) -> Response:
        engine = services.of(model).engine
        reading = service.read(lambda: document_list(engine))
        return _json(await while_connected(request, reading))

    @app.put("/v1/documents", dependencies=writers, status_code=202)
    async def upload(
        source: Annotated[str, Query()], request: Request, model: str | None = None
    ) -> Fields:
        return await services.of(model).uploads.receive(request, source)

    @app.get("/v1/uploads", dependencies=writers)
    async def uploads(model: str | None = None) -> Fields:
        return services.of(model).uploads.listed()

    @app.delete("/v1/documents", dependencies=writers)
    async def delete(source: Annotated[list[str], Query()], model: str | None = None) -> Fields:
        chosen = services.of(model)
        engine = chosen.engine
        left = {each for each in source if chosen.uploads.is_left(each)}
        await service.read(lambda: documents_of(engine, source, left))  # before one is cancelled
        cancelled = {each for each in source if chosen.uploads.cancel(each)}

        def work(check: Check) -> Fields:
            return delete_documents(engine, source, cancelled)

        return await service.worked(work, service.changes)

    @app.get("/health")
    @app.head("/health", include_in_schema=False)
    async def health(
        challenge: Annotated[str, Query(max_length=MAX_CHALLENGE_CHARS)] = "",
    ) -> Fields:
        service.check_open()
        service.check_moving(services.queues)
        if not challenge or service.record is None:
            return {"status": "ok"}
        return {"status": "ok", "proof": service.record.proof(challenge)}

    @app.get("/metrics")
    async def metrics() -> Response:
        stores = [await each.read_or_last("metrics", each.engine.prometheus) for each in services]
        text = joined(("", store) for store in stores) + service.exposition(services.queues)
        return PlainTextResponse(text, media_type=EXPOSITION)

    app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)(page)
    return CrossOriginMiddleware(app, service.origins) if service.origins else app


def _language_model(service: Service) -> Fields:
    context_tokens = service.engine.context_tokens
    return {**_model(service, service.model_id), "max_model_len": context_tokens}


def _json(content: bytes) -> Response:
    """What was written as JSON on a thread."""
    return Response(content, media_type="application/json")


def _model(service: Service, name: str) -> Fields:
    return {"id": name, "object": "model", "created": service.began, "owned_by": "blendrag"}
