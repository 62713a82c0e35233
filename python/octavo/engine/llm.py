"""The engine for offline use: a list of prompts in, their outputs in the same order."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec

from octavo.config import EngineConfig
from octavo.engine.backend import Backend, LocalBackend, WorkerBackend
from octavo.engine.collect import RequestState
from octavo.engine.gather import Gatherer
from octavo.engine.gc_policy import young_objects_only
from octavo.engine.interrupt import DeferredInterrupt
from octavo.engine.outputs import RequestOutput
from octavo.engine.progress import ProgressBar
from octavo.engine.protocol import Rejected
from octavo.engine.requests import CheckedRequest, RequestMaker
from octavo.errors import EngineDead, InvalidRequest
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.runner.interface import ModelInfo
    from octavo.text.tokenizer import Tokenizer

__all__ = ["LLM"]

Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any]"
Prompts: TypeAlias = "Prompt | Sequence[str] | Sequence[Sequence[int]] | Sequence[Mapping[str, Any]]"
Conversation: TypeAlias = "Sequence[Mapping[str, Any]]"


class LLM:
    """A model, in this process or in a worker process of its own.

        with LLM("demo") as llm:
            outputs = llm.generate(["Once upon a time", "2 + 2 ="], SamplingParams(temperature=0, max_tokens=32))

    In this process, some settings hold for the whole process, and `close` sets them back: `num_threads`, the threads of
    Octavo's CPU kernels, which every model shares; on a GPU those of torch's matrix products (cuBLASLt, no reduced
    sums, no TF32; the sizes of cuBLAS's workspaces in the environment stay) and torch's current stream in the thread
    that asks for answers. With `worker=True` nothing changes here; that costs a hop over a socket
    each step.

    Threads may share it: their calls wait for each other. Prompts given in one call run at once.

    Args:
        model: `demo`, a folder, a `.gguf` file, or a repository id of the Hugging Face hub.
        worker: run the model in a process of its own, which ends with this one.
        settings: the other fields of `EngineConfig`.

    Attributes:
        config: the settings.
        model: what was loaded.
        tokenizer: the model's tokenizer and chat template; None for a model that has none.

    Raises:
        ConfigError: a setting that cannot work, or does not exist.
        ModelError: the model's files cannot be used.
        EngineDead: the worker process ended before it was ready.
    """

    def __init__(self, model: str, *, worker: bool = False, **settings: Any) -> None:
        config = EngineConfig.of(model=model, **settings)
        with ProgressBar("Loading the model") as bar:
            backend = WorkerBackend.load(config, bar.stage) if worker else LocalBackend.load(config, bar.stage)
        self._use(config, backend)

    @classmethod
    def from_backend(cls, config: EngineConfig, backend: Backend) -> LLM:
        """An `LLM` over a loaded engine."""
        llm = cls.__new__(cls)
        llm._use(config, backend)
        return llm

    def _use(self, config: EngineConfig, backend: Backend) -> None:
        self.config = config
        self.model: ModelInfo = backend.model
        self.tokenizer: Tokenizer | None = backend.tokenizer
        self._backend = backend
        # Also when the last reference goes, and when the program ends.
        self._release = weakref.finalize(self, backend.close)
        self._requests = RequestMaker(backend.model, config.seed, backend.tokenizer)
        self._last_id = 0
        self._reason: str | None = None
        # Of a thread's own: a signal handler may close what the thread's call uses.
        self._turn = threading.RLock()

    # -------------------------------------------------------- answers

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for all prompts at once.

        Ctrl-C ends the running requests and leaves the engine usable.

        Args:
            prompts: one or a list of: a text; token ids; a dict with `prompt` or `prompt_token_ids`.
            sampling_params: one for all, or one a prompt; when None, 16 tokens by the model's recommended sampling.
            use_tqdm: show a progress bar when it takes long and standard error is a terminal.

        Returns:
            One output a prompt, in the prompts' order. One whose answers could not be held to `structured_outputs` to
            the end has an `error`, and answers that end with "error".

        Raises:
            InvalidRequest: a prompt or its parameters cannot be served; none of the prompts is run then.
            EngineDead: the engine failed in this call or before; its requests are lost.
        """
        self._check()
        parsed = [self._parse(prompt) for prompt in _as_list(prompts)]
        return self._run(parsed, _spread(sampling_params, len(parsed), self._requests.defaults()), use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_arguments: Any,
    ) -> list[RequestOutput]:
        """Generate replies to conversations, rendered with the model's chat template.

        Args:
            messages: one conversation, a list of `{"role": ..., "content": ...}`, or a list of such.
            sampling_params: as for `generate`, but an answer may go on to the context's end when None.
            use_tqdm: as for `generate`.
            template_arguments: passed to the template. With `continue_final_message=True` the model continues the
                last message.

        Raises:
            InvalidRequest, EngineDead: as for `generate`.
        """
        self._check()
        tokenizer = self._tokenizer()
        if isinstance(messages, Mapping):
            raise InvalidRequest("messages: is one message; give a list of them", "messages")
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        parsed: list[tuple[str | None, list[int]]] = []
        for conversation in cast("Sequence[Conversation]", conversations):
            text = tokenizer.apply_chat_template(conversation, **template_arguments)
            parsed.append((text, tokenizer.encode(text, add_special_tokens=False)))
        params = _spread(sampling_params, len(parsed), self._requests.defaults(max_tokens=None))
        begins = not template_arguments.get("continue_final_message", False)
        # One copy of each: the engine recognises parameters that repeat.
        copies = {id(one): msgspec.structs.replace(one, begins_text=begins) for one in params}
        return self._run(parsed, [copies[id(one)] for one in params], use_tqdm)

    def _run(
        self, prompts: list[tuple[str | None, list[int]]], params: list[SamplingParams], show: bool
    ) -> list[RequestOutput]:
        with self._turn:
            self._check()
            with young_objects_only():
                return self._run_alone(prompts, params, show)

    def _run_alone(
        self, prompts: list[tuple[str | None, list[int]]], params: list[SamplingParams], show: bool
    ) -> list[RequestOutput]:
        states: dict[int, RequestState] = {}
        requests: list[CheckedRequest] = []
        last: SamplingParams | None = None
        for number, ((text, ids), one) in enumerate(zip(prompts, params, strict=True), self._last_id + 1):
            requests.append(self._requests.check(number, ids, one, same_params=one is last))
            states[number] = RequestState(str(number), text, ids, one)
            last = one
        self._last_id += len(requests)
        gatherer = Gatherer(states)
        begun = time.monotonic()
        with DeferredInterrupt() as interrupt, ProgressBar("Answers", len(states), enabled=show) as bar:
            try:
                self._backend.submit(requests)
                while gatherer.num_unfinished:
                    outputs = self._backend.step()
                    if isinstance(outputs, Rejected):
                        gatherer.fail(outputs.request_id, outputs.error.exception())
                    elif outputs is not None:
                        gatherer.add(outputs)
                        if bar.due():
                            speed = gatherer.num_tokens / max(time.monotonic() - begun, 1e-6)
                            bar.update(len(states) - gatherer.num_unfinished, f"{speed:,.0f} tokens/s")
                    if interrupt.pending:
                        self._backend.abort(gatherer.unfinished())
                        raise KeyboardInterrupt
            except InvalidRequest:
                raise
            except BaseException as error:
                if not (isinstance(error, KeyboardInterrupt) and interrupt.pending and not interrupt.forced):
                    self._reason = f"the engine failed: {type(error).__name__}: {error}"
                raise
        gatherer.fold()
        return [state.output() for state in states.values()]

    # -------------------------------------------------------- prompts

    def _parse(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text (if given) and token ids of a prompt; the list is a copy."""
        if type(prompt) is list:
            return None, prompt.copy()
        if isinstance(prompt, Mapping):
            if prompt.get("prompt_token_ids") is not None:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            if not isinstance(prompt.get("prompt"), str):
                raise InvalidRequest("prompt: a dict must hold `prompt` (a text) or `prompt_token_ids`", "prompt")
            prompt = cast(str, prompt["prompt"])
        if isinstance(prompt, str):
            return prompt, self._tokenizer().encode(prompt)
        if not isinstance(prompt, Iterable):
            raise InvalidRequest(f"prompt: {type(prompt).__name__} is no prompt; give a text or token ids", "prompt")
        return None, list(prompt)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(
                "prompt: the model has no tokenizer; give token ids, or name a tokenizer in the settings", "prompt"
            )
        return self.tokenizer

    # -------------------------------------------------------- life

    def stats(self) -> dict[str, int | float]:
        """The core's gauges and counters, by name.

        Raises:
            EngineDead: the engine failed or was closed.
        """
        with self._turn:
            self._check()
            return self._backend.stats()

    def close(self) -> None:
        """Release the model's memory or end its process. Idempotent; later calls raise EngineDead."""
        with self._turn:
            self._reason = "the engine was closed"
            self._release()

    def _check(self) -> None:
        if self._reason is not None:
            raise EngineDead(self._reason)

    def __enter__(self) -> LLM:
        """The engine itself; `close` at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def _as_list(prompts: Prompts) -> list[Prompt]:
    """The prompts as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidRequest(f"prompts: {type(prompts).__name__} is no prompt; give texts or token ids", "prompt")
    listed: list[Any] = list(prompts)
    if listed and not isinstance(listed[0], str | Mapping | Sequence) and not hasattr(listed[0], "__len__"):
        return [listed]
    return listed


def _spread(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, default: SamplingParams
) -> list[SamplingParams]:
    """Parameters of each prompt.

    Raises:
        InvalidRequest: a list of another length than the prompts.
    """
    if params is None:
        return [default] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequest(
            f"sampling_params: {len(params)} for {count} prompts; give one for all or one a prompt", "sampling_params"
        )
    return list(params)
