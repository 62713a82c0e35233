"""POST routes: read the body, run the handler while the client is connected, send every error."""

from __future__ import annotations

import asyncio
import codecs
import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidRequest
from octavo.sampling_params import SamplingParams
from octavo.server.access.identity import Identity, cache_salt, identity_of
from octavo.server.error_responses import QueueFull, ServerStopping, UnsupportedMediaType
from octavo.server.observability.request_record import RequestRecord
from octavo.server.observability.request_telemetry import RequestTelemetry, telemetry_of
from octavo.server.queueing.admission import Admission
from octavo.server.queueing.body_budget import BodyShare
from octavo.server.queueing.deadline import request_deadline
from octavo.server.queueing.priority import engine_priority, request_priority
from octavo.server.request.field_renames import renamed_errors
from octavo.server.request.limits import check_constraint, check_json, check_request
from octavo.server.request.structured_outputs import specification
from octavo.server.transport.http import CHUNKS, ClientGone, ErrorFormat, Receive, Reply, Scope, Send, header, read_body

if TYPE_CHECKING:
    from octavo.server.models.model_handle import ModelHandle
    from octavo.server.observability.tracing import Trace
    from octavo.server.state import ServerState

__all__ = ["Endpoint", "Handler", "RequestContext"]

_LARGE_BYTES = 1 << 16

Handler = Callable[["RequestContext"], Awaitable[None]]


class RequestContext:
    """One request, as its handler sees it.

    Attributes:
        state: of the server.
        scope: ASGI's.
        body: the whole body.
        reply: the response; not begun.
        request_id: the client's if it is valid, else a new one; every response's `X-Request-Id`.
        telemetry: for its log line, trace and metrics.
        timeout: seconds from arrival that the body asks for; set by the handler.
        renames: the client's names of fields, by the names that the engine's errors use.
    """

    __slots__ = ("_releases", "body", "renames", "reply", "request_id", "scope", "state", "telemetry", "timeout")

    def __init__(
        self, state: ServerState, scope: Scope, body: bytes, reply: Reply, telemetry: RequestTelemetry
    ) -> None:
        self.state = state
        self.scope = scope
        self.body = body
        self.reply = reply
        self.request_id = telemetry.request_id
        self.telemetry = telemetry
        self._releases: list[Callable[[], None]] = []
        self.timeout: float | None = None
        self.renames: dict[str, str] = {}

    @property
    def trace(self) -> Trace | None:
        """The trace the request belongs to."""
        return self.telemetry.trace

    def header(self, name: bytes) -> str | None:
        """The first request header with a name, which must be in lower case."""
        return header(self.scope, name)

    async def route(
        self, name: str | None, *, user: object = None, session: object = None, variant: str | None = None
    ) -> ModelHandle:
        """Find the model for a request. It stays in use until the request ends.

        Args:
            name: model or alias; None for the server's first model.
            user: from the request; an alias of several models always gives a user the same one.
            session: from the request; used without a user, as are the header `X-Session-ID` and the API key's name.
            variant: id of one model of an alias; the header `X-Variant` is used without it.

        Raises:
            ServerStopping, EngineLoading, ModelUnavailable, ModelNotServed, EngineDead.
            InvalidRequest: the alias has no such variant.
        """
        state = self.state
        state.check_ready()
        model, release = await state.registry.acquire(
            name, lambda: str(user or session or self._session() or "") or None, variant or self.header(b"x-variant")
        )
        self._releases.append(release)
        self.reply.headers.append((b"x-model-version", model.version.encode()))
        return model

    def _session(self) -> str | None:
        identity = self.identity
        return self.header(b"x-session-id") or (None if identity.anonymous else identity.name)

    def end(self) -> None:
        """Release the models of the request."""
        releases, self._releases = self._releases, []
        for release in releases:
            release()

    @property
    def identity(self) -> Identity:
        """Who sent the request."""
        return identity_of(self.scope)

    async def constrain(self, model: ModelHandle, outputs: dict[str, Any] | None, field: str) -> None:
        """Check a constraint before the request enters the queue.

        Args:
            model: compiles it.
            outputs: as `SamplingParams.structured_outputs`.
            field: of the request; the engine's errors about the constraint name it too.

        Raises:
            InvalidRequest: the constraint is too long or cannot be compiled.
            QueueFull: too many constraints wait to be compiled.
            QueueTimeout: the request reached its deadline.
        """
        if outputs is None:
            return
        self.renames["structured_outputs"] = field
        kind, text = specification(outputs)
        check_constraint(text, field, self.state.settings)
        deadline = self.deadline()
        checking = self.state.grammar_check(model).check(kind, text, field, self.identity.tenant)
        if deadline is None:
            await checking
            return
        try:
            await asyncio.wait_for(checking, max(0.0, deadline - asyncio.get_running_loop().time()))
        except asyncio.TimeoutError:
            raise self.state.admission_queue(model).timed_out() from None

    def admission(self, model: ModelHandle, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Admission:
        """Admission to the engine: an async context manager around the generation.

        Raises:
            InvalidRequest: the request asks for too much, or a header is invalid.
        """
        state, identity = self.state, self.identity
        settings = state.settings
        check_request(prompts, params, model.max_model_len, settings)
        level = request_priority(self.scope, identity, params.priority)
        own = copy.copy(params)
        own.priority = engine_priority(level, params.priority)
        own.cache_salt = cache_salt(identity, params.cache_salt, shared=settings.share_prefix_cache)
        limit = identity.max_concurrency
        return Admission(
            state.admission_queue(model),
            state.concurrency,
            identity,
            settings.max_concurrency if limit is None else limit,
            level,
            prompts,
            own,
            model.max_model_len,
            self.deadline(),
        )

    def deadline(self) -> float | None:
        """When the request times out, on the loop's clock; None for never.

        Raises:
            InvalidRequest: the header or the body does not give a valid number of seconds.
        """
        return request_deadline(self.scope, self.telemetry.arrival, self.state.settings.request_timeout, self.timeout)

    def sampling_defaults(self, model: ModelHandle) -> Mapping[str, Any]:
        """Sampling parameters for fields that the request leaves out."""
        return self.state.settings.sampling_defaults(model.sampling_defaults)

    def record(self, model: ModelHandle, prompt_tokens: int, num_prompts: int = 1) -> RequestRecord:
        """Begin the record of the request's times and counts, from its arrival."""
        metrics = self.state.metrics
        record = RequestRecord(
            metrics,
            model.model_label,
            prompt_tokens,
            num_prompts,
            name=model.name,
            variant=model.version,
            engine=metrics.engine_label(model.model_label, model.version),
            arrival=self.telemetry.arrival,
        )
        self.telemetry.record = record
        return record


class Endpoint:
    """A POST route.

    Args:
        state: of the server.
        handler: answers a request.
        errors: format of its errors; OpenAI's when None.
        any_content_type: accept a body of another content type than JSON, except from a web page.
    """

    def __init__(
        self,
        state: ServerState,
        handler: Handler,
        errors: ErrorFormat | None = None,
        *,
        any_content_type: bool = False,
    ) -> None:
        self._state = state
        self.handler = handler
        self._errors = errors
        self._any_content_type = any_content_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        held = self._state.bodies.share()
        try:
            await self._answer(scope, receive, send, held)
        finally:
            held.release()

    async def _answer(self, scope: Scope, receive: Receive, send: Send, held: BodyShare) -> None:
        telemetry = telemetry_of(scope)
        reply = Reply(send, telemetry.headers, self._errors, (scope.get("extensions") or {}).get(CHUNKS))
        state = self._state
        try:
            body = await self._body(scope, receive, held)
        except ClientGone:
            telemetry.disconnected = True
            return
        except (InvalidRequest, QueueFull) as error:
            await reply.fail(error)
        else:
            if state.settings.log_prompts:
                telemetry.prompt = body[: 4 * state.settings.log_prompts].decode("utf-8", "replace")[
                    : state.settings.log_prompts
                ]
            context = RequestContext(state, scope, body, reply, telemetry)
            try:
                if not await state.run(self._handle(context), receive):
                    telemetry.disconnected = True
            finally:
                context.end()
        telemetry.error_code = reply.error_code

    async def _body(self, scope: Scope, receive: Receive, held: BodyShare) -> bytes:
        kind = header(scope, b"content-type")
        body = await read_body(scope, receive, self._state.settings.max_body_bytes, held.take)
        body = body.removeprefix(codecs.BOM_UTF8)
        if self._any_content_type and header(scope, b"origin") is None:
            await self._check(body)
            return body
        if kind is not None and kind.split(";")[0].strip().lower() not in ("application/json", ""):
            raise UnsupportedMediaType(f"Content-Type: {kind[:60]!r} is not supported; send application/json")
        await self._check(body)
        return body

    async def _check(self, body: bytes) -> None:
        if len(body) > _LARGE_BYTES:
            await asyncio.to_thread(check_json, body, self._state.settings)
        else:
            check_json(body, self._state.settings)

    async def _handle(self, context: RequestContext) -> None:
        reply = context.reply
        try:
            with renamed_errors(context.renames):
                await self.handler(context)
        except asyncio.CancelledError:
            if not self._state.aborting:
                raise
            await reply.fail(ServerStopping("The server is shutting down; this response was cut short."))
        except Exception as error:
            await reply.fail(error)
