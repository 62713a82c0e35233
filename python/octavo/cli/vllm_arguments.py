"""Arguments as vLLM's users type them, and what to do instead where Octavo has no such flag."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["missing_flags", "serve_arguments"]

_ONE_GPU = "an engine runs on one GPU; start a server a GPU (CUDA_VISIBLE_DEVICES) behind a proxy, or leave it out"
_GRAPHS = "a GPU's steps are CUDA graphs, captured as their sizes come, and nothing is to be set; leave it out"
_ADAPTERS = "adapters are not supported; merge the adapter into its model's weights and serve those"
_TOOLS = "the server calls no tools for a model; send response_format to have answers of one form, and leave it out"
_SPECULATION = "there is no speculative decoding; leave it out"
_CHUNKED = "prompts are always computed in chunks of --max-num-batched-tokens with other requests; leave it out"
_CONSTRAINTS = "one way of holding answers to a form is built in; leave it out"
_OFFLOAD = "weights and KV cache stay on the device; use a smaller or GGUF-quantized model, or --device cpu"
_MEDIA = "models read text only; leave it out"
_LOG = "every request is one line of the log; --log-prompts N adds what it began with, --no-access-log takes it away"
_KINDS = "what a model is follows from its files; leave it out"

# The most used of vLLM's flags that Octavo has not.
_INSTEAD = {
    "--api-server-count": "use --api-processes",
    "--async-scheduling": "on a GPU the next step is always planned ahead; leave it out",
    "--chat-template": "the model's own is used; put another into its folder as chat_template.jinja",
    "--compilation-config": _GRAPHS,
    "--config-format": _KINDS,
    "--cpu-offload-gb": _OFFLOAD,
    "--cudagraph-capture-sizes": _GRAPHS,
    "--data-parallel-size": _ONE_GPU,
    "--disable-log-stats": "no figures are logged; they are read from /metrics",
    "--distributed-executor-backend": _ONE_GPU,
    "--download-dir": "name the folder in the environment: OCTAVO_CACHE",
    "--enable-auto-tool-choice": _TOOLS,
    "--enable-chunked-prefill": _CHUNKED,
    "--enable-expert-parallel": _ONE_GPU,
    "--enable-force-include-usage": "a request asks for it: stream_options.include_usage",
    "--enable-log-requests": _LOG,
    "--enable-lora": _ADAPTERS,
    "--enable-prompt-tokens-details": "usage always tells the cached tokens; leave it out",
    "--enable-sleep-mode": "models are unloaded instead: --idle-unload, or by --admin-port",
    "--enforce-eager": _GRAPHS,
    "--guided-decoding-backend": _CONSTRAINTS,
    "--hf-overrides": "edit config.json of a local folder, and serve that",
    "--hf-token": "set HF_TOKEN in the environment",
    "--kv-cache-memory-bytes": "use --kv-cache-memory, in bytes or such as 4GiB",
    "--kv-offloading-size": _OFFLOAD,
    "--kv-transfer-config": "KV caches are not sent between servers; leave it out",
    "--limit-mm-per-prompt": _MEDIA,
    "--logprobs-mode": "log probabilities are the model's own, before temperature and thresholds; leave it out",
    "--long-prefill-token-threshold": _CHUNKED,
    "--lora-modules": _ADAPTERS,
    "--max-logprobs": "a request may ask for 20; leave it out",
    "--max-loras": _ADAPTERS,
    "--max-lora-rank": _ADAPTERS,
    "--max-num-partial-prefills": _CHUNKED,
    "--max-seq-len-to-capture": _GRAPHS,
    "--middleware": "none is loaded into the server; put a proxy in front of it",
    "--mm-processor-kwargs": _MEDIA,
    "--model-impl": _KINDS,
    "--num-scheduler-steps": "steps are planned one by one; leave it out",
    "--num-speculative-tokens": _SPECULATION,
    "--pipeline-parallel-size": _ONE_GPU,
    "--quantization": "what a GGUF file is quantized to is read from it; leave it out",
    "--reasoning-parser": "reasoning is not parted from the answer yet; leave it out",
    "--response-role": "answers are the assistant's; leave it out",
    "--return-tokens-as-token-ids": "a request asks for it, by a field of that name",
    "--revision": "download it with `hf download REPOSITORY --revision NAME --local-dir FOLDER`, and serve that folder",
    "--runner": _KINDS,
    "--spec-method": _SPECULATION,
    "--spec-model": _SPECULATION,
    "--spec-tokens": _SPECULATION,
    "--speculative-config": _SPECULATION,
    "--speculative-model": _SPECULATION,
    "--stream-interval": "every token is sent as it comes; leave it out",
    "--structured-outputs-config": _CONSTRAINTS,
    "--swap-space": "what is pushed out is computed again; leave it out",
    "--task": _KINDS,
    "--tensor-parallel-size": _ONE_GPU,
    "--tokenizer-mode": _KINDS,
    "--tool-call-parser": _TOOLS,
    "--uds": "a port is listened on: --host and --port",
}
_SHORT = {
    "-O": "--compilation-config",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-dp": "--data-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}


def serve_arguments(arguments: list[str]) -> list[str]:
    """The command line of `octavo` that serves.

    Each `--model M` becomes an argument of the command, and flags may be written with underscores.
    """
    rest: list[str] = []
    models: list[str] = []
    waiting = False
    for argument in arguments:
        if waiting:
            waiting = False
            models.append(argument)
            continue
        flag, equals, value = argument.partition("=")
        if flag.startswith("--"):
            argument = flag.replace("_", "-") + equals + value
        if argument == "--model":
            waiting = True
        elif argument.startswith("--model="):
            models.append(argument.removeprefix("--model="))
        else:
            rest.append(argument)
    return ["serve", *rest, *(["--", *models] if models else [])]


def missing_flags(arguments: Sequence[str]) -> list[str]:
    """A line for each of vLLM's flags among the arguments that Octavo has not: which, and what to do instead."""
    found: dict[str, str] = {}
    for argument in arguments:
        if argument == "--":
            break
        given = argument.partition("=")[0]
        flag = _SHORT.get(given, given)
        # -O is followed by its level without a blank.
        if given[:2] == "-O":
            flag = _SHORT["-O"]
        instead = _INSTEAD.get(flag) or _INSTEAD.get("--" + flag.removeprefix("--no-"))
        if instead is not None:
            found.setdefault(given, instead)
    return [f"{given}: Octavo has no such flag; {instead}" for given, instead in found.items()]
