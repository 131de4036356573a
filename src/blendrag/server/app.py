"""The routes."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from blendrag.frameworks.streaming import to_thread
from blendrag.server.access import Door, require_writer
from blendrag.server.bodies import ChatBody, CompletionBody, EmbeddingBody, IngestBody
from blendrag.server.chats import chat_chunks, chat_completion
from blendrag.server.completions import completion, completion_chunks
from blendrag.server.documents import delete_documents, documents, ingest
from blendrag.server.embeddings import embeddings
from blendrag.server.events import streamed, while_connected
from blendrag.server.page import page
from blendrag.server.refusals import install_refusals
from blendrag.server.replies import Fields
from blendrag.server.service import Service

#: Of Prometheus' text format.
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def create_app(service: Service) -> FastAPI:
    """The ASGI application; the caller opens and closes the engine."""
    app = FastAPI(title="blendrag", docs_url=None, redoc_url=None)
    app.add_middleware(Door, keys=service.keys, max_body_bytes=service.limits.max_body_bytes)
    install_refusals(app)
    engine, writers = service.engine, [Depends(require_writer)]

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        service.check_model(body.model)
        body.sent_by(request.state.tenant)
        if body.stream:
            return await streamed(request, chat_chunks(service, body))
        return JSONResponse(await while_connected(request, chat_completion(service, body)))

    @app.post("/v1/completions")
    async def complete(body: CompletionBody, request: Request) -> Response:
        service.check_model(body.model)
        body.sent_by(request.state.tenant)
        if body.stream:
            return await streamed(request, completion_chunks(service, body))
        return JSONResponse(await while_connected(request, completion(service, body)))

    @app.post("/v1/embeddings")
    async def embed(body: EmbeddingBody, request: Request) -> Response:
        service.check_embedder(body.model)
        work = partial(embeddings, engine, body, service.embedder_id)
        return JSONResponse(await while_connected(request, service.embedded(work)))

    @app.get("/v1/models")
    async def models() -> Fields:
        return {"object": "list", "data": [_language_model(service), _embedder(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Fields:
        if name == service.embedder_id:
            return _embedder(service)
        service.check_model(name)
        return _language_model(service)

    @app.post("/v1/ingest", dependencies=writers)
    async def add(body: IngestBody) -> Fields:
        async with service.changing:
            return await to_thread(ingest, engine, body)

    @app.get("/v1/documents")
    async def listing() -> Fields:
        return await to_thread(documents, engine)

    @app.delete("/v1/documents", dependencies=writers)
    async def delete(source: Annotated[list[str], Query()]) -> Fields:
        async with service.changing:
            return await to_thread(delete_documents, engine, source)

    @app.get("/health")
    @app.head("/health", include_in_schema=False)
    async def health() -> Fields:
        service.check_open()
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        store = await to_thread(engine.prometheus)
        return PlainTextResponse(store + service.admission.exposition(), media_type=EXPOSITION)

    app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)(page)
    return app


def _language_model(service: Service) -> Fields:
    context_tokens = service.engine.resources.context_tokens
    return {**_model(service, service.model_id), "max_model_len": context_tokens}


def _embedder(service: Service) -> Fields:
    return _model(service, service.embedder_id)


def _model(service: Service, name: str) -> Fields:
    return {"id": name, "object": "model", "created": service.began, "owned_by": "blendrag"}
