"""One POST exchange: its body is read, its work runs while the client is there, every failure is answered."""

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
from octavo.server.observability.request_context import RequestContext, context_of
from octavo.server.observability.request_record import RequestRecord
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

__all__ = ["Call", "Exchange", "Process"]

_LARGE_BYTES = 1 << 16

Process = Callable[["Call"], Awaitable[None]]


class Call:
    """What a route's work is given.

    Attributes:
        state: the server's.
        scope: ASGI's, of this exchange.
        body: bytes, whole.
        reply: the answer, not begun.
        request_id: the client's where harmless, else a fresh one; in every answer's `X-Request-Id`.
        context: what its log line, its trace and its metrics know of it.
        timeout: seconds from its arrival that the request's own body gives it; set by the route's work.
        renames: fields as the client wrote them, by the names that errors of the engine have.
    """

    __slots__ = ("_releases", "body", "context", "renames", "reply", "request_id", "scope", "state", "timeout")

    def __init__(self, state: ServerState, scope: Scope, body: bytes, reply: Reply, context: RequestContext) -> None:
        self.state = state
        self.scope = scope
        self.body = body
        self.reply = reply
        self.request_id = context.request_id
        self.context = context
        self._releases: list[Callable[[], None]] = []
        self.timeout: float | None = None
        self.renames: dict[str, str] = {}

    @property
    def trace(self) -> Trace | None:
        """The trace the request belongs to."""
        return self.context.trace

    def header(self, name: bytes) -> str | None:
        """The first request header of a (lower case) name."""
        return header(self.scope, name)

    async def route(
        self, name: str | None, *, user: object = None, session: object = None, variant: str | None = None
    ) -> ModelHandle:
        """The model that is to answer a request for `name`, in use until the exchange ends.

        Args:
            name: model or alias; None: the server's first.
            user: by the request; of an alias of several models the same one always answers a user.
            session: by the request; stands in for the user, as do the header `X-Session-ID` and the API key's name.
            variant: the alias's model that is wanted, by its id; the header `X-Variant` stands in for it.

        Raises:
            ServerStopping, EngineLoading, ModelUnavailable, ModelNotServed, EngineDead.
            InvalidRequest: the alias has no such variant.
        """
        state = self.state
        state.check_ready()
        served, release = await state.registry.acquire(
            name, lambda: str(user or session or self._session() or "") or None, variant or self.header(b"x-variant")
        )
        self._releases.append(release)
        self.reply.headers.append((b"x-model-version", served.version.encode()))
        return served

    def _session(self) -> str | None:
        identity = self.identity
        return self.header(b"x-session-id") or (None if identity.anonymous else identity.name)

    def end(self) -> None:
        """The exchange is over: its models are no longer in use by it."""
        releases, self._releases = self._releases, []
        for release in releases:
            release()

    @property
    def identity(self) -> Identity:
        """Whom the request is from."""
        return identity_of(self.scope)

    async def constrain(self, served: ModelHandle, outputs: dict[str, Any] | None, field: str) -> None:
        """Refuse what an answer cannot be held to, before the request waits for its turn.

        Args:
            served: the model that answers.
            outputs: as `SamplingParams.structured_outputs`.
            field: that asked for it; later errors of the engine are told by it too.

        Raises:
            InvalidRequest: it is too long, or cannot be compiled.
            QueueFull: too much waits to be compiled.
            QueueTimeout: the request's time was over first.
        """
        if outputs is None:
            return
        self.renames["structured_outputs"] = field
        kind, text = specification(outputs)
        check_constraint(text, field, self.state.settings)
        deadline = self.deadline()
        checking = self.state.grammar_check(served).check(kind, text, field, self.identity.tenant)
        if deadline is None:
            await checking
            return
        try:
            await asyncio.wait_for(checking, max(0.0, deadline - asyncio.get_running_loop().time()))
        except asyncio.TimeoutError:
            raise self.state.admission_queue(served).timed_out() from None

    def admission(self, served: ModelHandle, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Admission:
        """The request's way into the engine: `async with` it around the generating.

        Raises:
            InvalidRequest: it asks for too much, or a header cannot be read.
        """
        state, identity = self.state, self.identity
        settings = state.settings
        check_request(prompts, params, served.max_model_len, settings)
        level = request_priority(self.scope, identity, params.priority)
        own = copy.copy(params)
        own.priority = engine_priority(level, params.priority)
        own.cache_salt = cache_salt(identity, params.cache_salt, shared=settings.share_prefix_cache)
        limit = identity.max_concurrency
        return Admission(
            state.admission_queue(served),
            state.concurrency,
            identity,
            settings.max_concurrency if limit is None else limit,
            level,
            prompts,
            own,
            served.max_model_len,
            self.deadline(),
        )

    def deadline(self) -> float | None:
        """When the request's time is over, on the loop's clock; None for no deadline.

        Raises:
            InvalidRequest: the header or the body does not give a valid number of seconds.
        """
        return request_deadline(self.scope, self.context.arrival, self.state.settings.request_timeout, self.timeout)

    def sampling_defaults(self, served: ModelHandle) -> Mapping[str, Any]:
        """What holds for a model where a request says nothing."""
        return self.state.settings.sampling_defaults(served.sampling_defaults)

    def record(self, served: ModelHandle, prompt_tokens: int, num_prompts: int = 1) -> RequestRecord:
        """The request's times and counts, from its arrival on."""
        metrics = self.state.metrics
        record = RequestRecord(
            metrics,
            served.model_label,
            prompt_tokens,
            num_prompts,
            name=served.name,
            variant=served.version,
            engine=metrics.engine_label(served.model_label, served.version),
            arrival=self.context.arrival,
        )
        self.context.record = record
        return record


class Exchange:
    """A POST route: reads the body, runs the work while the client is there, answers every failure.

    Args:
        process: the work.
        errors: how its errors look; OpenAI's way when None.
        any_content_type: take a body that does not say it is JSON, except from a web page.
    """

    def __init__(
        self,
        state: ServerState,
        process: Process,
        errors: ErrorFormat | None = None,
        *,
        any_content_type: bool = False,
    ) -> None:
        self._state = state
        self.process = process
        self._errors = errors
        self._any_content_type = any_content_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        held = self._state.bodies.share()
        try:
            await self._exchange(scope, receive, send, held)
        finally:
            held.release()

    async def _exchange(self, scope: Scope, receive: Receive, send: Send, held: BodyShare) -> None:
        context = context_of(scope)
        reply = Reply(send, context.headers, self._errors, (scope.get("extensions") or {}).get(CHUNKS))
        state = self._state
        try:
            body = await self._body(scope, receive, held)
        except ClientGone:
            context.disconnected = True
            return
        except (InvalidRequest, QueueFull) as error:
            await reply.fail(error)
        else:
            if state.settings.log_prompts:
                context.prompt = body[: 4 * state.settings.log_prompts].decode("utf-8", "replace")[
                    : state.settings.log_prompts
                ]
            call = Call(state, scope, body, reply, context)
            try:
                if not await state.run(self._work(call), receive):
                    context.disconnected = True
            finally:
                call.end()
        context.error_code = reply.error_code

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

    async def _work(self, call: Call) -> None:
        reply = call.reply
        try:
            with renamed_errors(call.renames):
                await self.process(call)
        except asyncio.CancelledError:
            if not self._state.aborting:
                raise
            await reply.fail(ServerStopping("The server is shutting down; this answer was cut short."))
        except Exception as error:
            await reply.fail(error)
