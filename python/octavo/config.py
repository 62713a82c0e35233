"""The settings of one engine, under the names that vLLM's users know."""

from __future__ import annotations

import difflib
import math
from typing import Any, Literal

import msgspec

from octavo.errors import ConfigError
from octavo.sizes import parse_bytes

__all__ = ["DTYPES", "EngineConfig"]

DTYPES = ("auto", "bfloat16", "float16", "float32")
_INTEGERS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_blocks",
    "kv_cache_memory",
    "num_threads",
)
_CHOICES = {
    "dtype": DTYPES,
    "device": ("auto", "cpu", "cuda"),
    "load_format": ("auto", "dummy", "fake"),
    "scheduling_policy": ("fcfs", "priority"),
    "kv_cache_dtype": ("auto", "fp8", "fp8_e4m3"),
}
_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
_SEQUENCE_COUNTS = {"cpu": (256,), "cuda": (1024, 512, 256)}
_KINDS: dict[Any, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    tuple[str, ...]: 'a list of texts, such as ["chat"]',
}
_NO_MODEL = "model: is missing; name `demo`, a folder, a .gguf file or a hub repository"
_ONE_GPU = "an engine runs on one GPU; leave it out"
# What vLLM's users write for settings that are called otherwise, or are not there.
_INSTEAD = {
    "async_scheduling": "use overlap",
    "data_parallel_size": _ONE_GPU,
    "disable_log_stats": "LLM.stats() gives the figures; leave it out",
    "enable_chunked_prefill": "prompts are always computed in chunks of max_num_batched_tokens; leave it out",
    "enforce_eager": "a GPU's steps are always CUDA graphs; leave it out",
    "kv_cache_memory_bytes": "use kv_cache_memory",
    "num_gpu_blocks_override": "use num_blocks",
    "pipeline_parallel_size": _ONE_GPU,
    "quantization": "what a GGUF file is quantized to is read from it; leave it out",
    "swap_space": "what is pushed out is computed again; leave it out",
    "tensor_parallel_size": _ONE_GPU,
}


class EngineConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Settings for loading and running a model.

    Attributes:
        model: `demo`, a folder, a `.gguf` file, or a repository id of the Hugging Face hub.
        tokenizer: folder, file or repository of the tokenizer; the model's own when None.
        dtype: weights, activations and KV cache. `auto`: bfloat16 where the device multiplies it natively, else
            float32.
        device: `auto`, `cpu` or `cuda`.
        load_format: `auto`; `dummy` for random weights from a `config.json` alone; or `fake` for no model at all: any
            name is served, by a passage written token by token, at once (see `octavo.runner.fake.FakeOptions`).
        max_model_len: tokens of prompt and output together, at least 2; the model's own limit when None, less where
            the KV cache cannot hold one such sequence.
        max_num_seqs: sequences that run at once. When None, 256 on a CPU, and on a GPU as many up to 1,024 as leave it
            nine tenths of the KV cache that 256 would.
        max_num_batched_tokens: tokens computed in one step, at most; when None 2048 on a CPU and 8192 on a GPU, and
            never fewer than sequences that run at once.
        block_size: tokens a block, a multiple of 16.
        kv_cache_dtype: `auto`, as the activations; or `fp8` (e4m3), on a GPU: half the memory, and a little less exact.
        num_blocks: blocks of the KV cache; planned from the memory when None.
        gpu_memory_utilization: share of the device's *free* memory that weights, activations and KV cache may take.
        kv_cache_memory: bytes of KV cache, within the share. When None, on a CPU 1 GiB or what is free, on a GPU all
            that the share leaves.
        scheduling_policy: `fcfs` or `priority` (lower numbers first).
        enable_prefix_caching: reuse the blocks of equal prefixes.
        overlap: plan the next step before the last one is committed; None: on a GPU yes, on a CPU no.
        seed: of the sampling of requests that name none.
        stall_timeout: seconds that a step may stand still before the engine's process counts as hung and is restarted.
        restart_limit: restarts in a row that may fail, or end within a minute, before the engine is given up.
        num_threads: CPU threads of the engine; the physical cores it may use when None.
        trust_remote_code: refused; here so that the refusal can say why.
    """

    model: str
    tokenizer: str | None = None
    served_model_name: tuple[str, ...] = ()
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    load_format: Literal["auto", "dummy", "fake"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory: int | None = None
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    enable_prefix_caching: bool = True
    overlap: bool | None = None
    seed: int = 0
    num_threads: int | None = None
    stall_timeout: float = 30.0
    restart_limit: int = 5
    trust_remote_code: bool = False

    @classmethod
    def of(cls, **settings: object) -> EngineConfig:
        """Settings from names and values, types checked; `kv_cache_memory` may be a text such as `8GiB`.

        Raises:
            ConfigError: a value that cannot work, of the wrong type, or under a name that does not exist.
        """
        fields = {field.name: field.type for field in msgspec.structs.fields(cls)}
        for name in settings:
            if name not in fields:
                raise ConfigError(_no_such_setting(name, list(fields)))
        if settings.get("model") is None:
            raise ConfigError(_NO_MODEL)
        return cls(**{name: _converted(name, value, fields[name]) for name, value in settings.items()})

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: naming the setting, its value and the remedy.
        """
        if not self.model:
            raise ConfigError(_NO_MODEL)
        if self.trust_remote_code:
            raise ConfigError("trust_remote_code: Octavo never runs code from model files; leave it off")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}: {getattr(self, name)!r} is not one of {', '.join(choices)}")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise ConfigError(f"seed: {self.seed} does not fit 64 bits; use a smaller one")
        for name in _INTEGERS:
            value = getattr(self, name)
            if value is not None and value >= 1 << 62:
                raise ConfigError(f"{name}: {value} is too large; use a smaller number")
        for name, low in (
            ("max_model_len", 2),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("block_size", 16),
        ):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name}: {value} is too small; use {low} or more")
        if self.block_size % 16:
            raise ConfigError(f"block_size: {self.block_size} is not a multiple of 16; use 16 or 32")
        if (self.max_num_batched_tokens or math.inf) < (self.max_num_seqs or 0):
            raise ConfigError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is less than max_num_seqs "
                f"({self.max_num_seqs}), but a step has a token of each sequence; raise it, or lower max_num_seqs"
            )
        for name in ("num_blocks", "kv_cache_memory", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: {value} is not positive; leave it out to let Octavo choose")
        if not (math.isfinite(self.stall_timeout) and self.stall_timeout >= 1):
            raise ConfigError(f"stall_timeout: {self.stall_timeout} is not 1 second or more; use such as 30")
        if self.restart_limit < 0:
            raise ConfigError(f"restart_limit: {self.restart_limit} is negative; use 0 for no restart at all")
        if not (math.isfinite(self.gpu_memory_utilization) and 0 < self.gpu_memory_utilization <= 1):
            raise ConfigError(
                f"gpu_memory_utilization: {self.gpu_memory_utilization} is not in (0, 1]; it is the share of the "
                "device's free memory to take, such as 0.9"
            )

    def batched_tokens(self, device: str) -> int:
        """`max_num_batched_tokens` on a device, `cpu` or `cuda`."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(_BATCHED_TOKENS[device], self.max_num_seqs or 0)

    def sequence_counts(self, device: str) -> list[int]:
        """`max_num_seqs` on a device, `cpu` or `cuda`; when it is None, the counts to choose from, largest first."""
        if self.max_num_seqs is not None:
            return [self.max_num_seqs]
        return [min(count, self.batched_tokens(device)) for count in _SEQUENCE_COUNTS[device]]


def _no_such_setting(name: str, names: list[str]) -> str:
    instead = _INSTEAD.get(name)
    if instead is not None:
        return f"{name}: there is no such setting; {instead}"
    close = difflib.get_close_matches(name, names, 2)
    hint = f"did you mean {' or '.join(close)}? There are" if close else "there are"
    return f"{name}: there is no such setting; {hint} {', '.join(names)}"


def _converted(name: str, value: object, kind: Any) -> Any:
    """A value as its field has it; one of several choices is left to the field's own check.

    Raises:
        ConfigError: of another type.
    """
    if name in _CHOICES:
        return value
    size = name == "kv_cache_memory"
    if size and isinstance(value, str):
        return parse_bytes(value, name)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        pass
    optional = value is not None and any(kind == known | None for known in _KINDS)
    wanted = next(text for known, text in _KINDS.items() if kind in (known, known | None))
    if size:
        wanted += " of bytes, nor a size such as 8GiB"
    remedy = "; leave it out to let Octavo choose" if optional else "; leave it out for the default"
    raise ConfigError(f"{name}: {value!r:.80} is not {wanted}{remedy}")
