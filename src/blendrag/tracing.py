"""OpenTelemetry spans of a request, if the application set a tracer provider; otherwise nothing.

::

    ask
    ├── retrieval STORE
    └── chat MODEL            text_completion MODEL without a chat template
        ├── plan              again after stored KV failed verification
        ├── prefill           until the first token
        │   └── load          on the loader's thread
        └── decode

Names and ``gen_ai.*`` attributes follow OpenTelemetry's semantic conventions for generative AI; what they
have no name for is under ``blendrag.``. No prompt, question or answer is recorded. Needs
``opentelemetry-api`` (``blendrag[otel]``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

try:
    from opentelemetry import context as _context
    from opentelemetry import trace as _trace
except ImportError:
    _context = _trace = None

#: Attributes, made only if the span is recorded. Those that are ``None`` are left out.
Attributes = Callable[[], Mapping[str, Any]]
#: Adds attributes to a span.
Add = Callable[[Attributes], None]
PROVIDER = {"gen_ai.provider.name": "blendrag"}


def current() -> Any:
    """The context of this thread, whose span is the parent of what another thread does for it."""
    return None if _context is None else _context.get_current()


@contextmanager
def span(
    name: str, attributes: Attributes = dict, parent: Any = None, began: float | None = None
) -> Iterator[Add]:
    """A span around the body, the parent of spans in it; an error is recorded.

    ``parent``: a :func:`current` context. ``began``: ``time.perf_counter()``; default: now.
    """
    tracer = _tracer()
    if tracer is None:
        yield _ignored
        return
    start = None if began is None else _epoch_ns(began)
    made = tracer.start_span(name, parent, start_time=start)
    add = _adds_to(made)
    add(attributes)
    try:
        with _trace.use_span(made, record_exception=False, set_status_on_exception=False):
            yield add
    except BaseException as exc:
        _record(made, exc)
        raise
    finally:
        made.end()


@contextmanager
def generation(first_token: Callable[[], float | None]) -> Iterator[tuple[Add, Add]]:
    """The spans ``prefill`` and ``decode`` around a generation, and functions that add to them.

    ``first_token``: ``time.perf_counter()`` of it, ``None`` before.
    """
    tracer = _tracer()
    if tracer is None:
        yield _ignored, _ignored
        return
    later: list[Attributes] = []
    prefill = failed = tracer.start_span("prefill")
    error: BaseException | None = None
    try:
        with _trace.use_span(prefill, record_exception=False, set_status_on_exception=False):
            yield _adds_to(prefill), later.append
    except BaseException as exc:
        error = exc
        raise
    finally:
        at = first_token()
        if at is not None:
            first_ns = _epoch_ns(at)
            prefill.end(first_ns)
            failed = tracer.start_span("decode", start_time=first_ns)
            for attributes in later:
                _adds_to(failed)(attributes)
        if error is not None:
            _record(failed, error)
        failed.end()


def _tracer() -> Any:
    """``None`` if nothing records: no package, or no provider was set."""
    if _trace is None or isinstance(_trace.get_tracer_provider(), _trace.ProxyTracerProvider):
        return None
    return _trace.get_tracer("blendrag")


def _adds_to(made: Any) -> Add:
    def add(attributes: Attributes) -> None:
        if made.is_recording():
            made.set_attributes({k: v for k, v in attributes().items() if v is not None})

    return add


def _ignored(attributes: Attributes) -> None:
    pass


def _record(made: Any, exc: BaseException) -> None:
    made.set_attribute("error.type", type(exc).__qualname__)
    made.record_exception(exc)
    made.set_status(_trace.Status(_trace.StatusCode.ERROR, str(exc)))


def _epoch_ns(at: float) -> int:
    return time.time_ns() - round((time.perf_counter() - at) * 1e9)
