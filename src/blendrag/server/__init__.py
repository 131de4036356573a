"""OpenAI's HTTP interface over one engine: ``blendrag serve``. Needs the extra ``blendrag[server]``.

====================================  ==========================================================
bodies                                what requests may hold
access                                bearer keys, and what a server takes
asking                                a body → prompt and options of the engine
service, admission                    the engine, its limits, and what waits or runs
replies                               an answer → OpenAI's objects
chats completions embeddings          OpenAI's endpoints
documents                             the corpus: ingest, list, delete
events                                server-sent events, and clients that go away
refusals                              an exception → status and OpenAI's error object
page                                  the page at ``/``
app                                   the routes
running                               the socket, the process, SIGTERM
====================================  ==========================================================
"""
