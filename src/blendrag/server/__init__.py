"""OpenAI's HTTP interface over one engine: ``blendrag serve``. Needs the extra ``blendrag[server]``.

=====================  =================================================
bodies                 what requests may hold
access                 bearer keys and the limit of a body's size
asking                 a body → prompt and options of the engine
admission              how many requests wait or run, and how they ended
replies                an answer → OpenAI's objects
events                 server-sent events, and clients that go away
refusals               an exception → status and OpenAI's error object
app                    the routes
running                the socket, the process, SIGTERM
=====================  =================================================
"""
