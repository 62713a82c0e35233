"""The demo model on a device in bfloat16: as near to transformers in float32 as transformers itself in bfloat16.

`OCTAVO_DEMO_GGUF` names the file where the demo cannot be fetched. transformers reads the same file and runs on the
same device. `-s` shows the figures.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo import LLM, SamplingParams
from octavo.loading.resolve import resolve_model
from small_models import DEVICE, NEEDS_DEVICE

pytestmark = [pytest.mark.demo, *NEEDS_DEVICE]

GOLDEN = json.loads((Path(__file__).parents[1] / "sameness" / "golden.json").read_text())["answers"]
NUM_PROMPTS, NUM_TOKENS = 20, 48
# Positions of the longest text compared; every prefix of a text is a prompt of its own.
MOST_POSITIONS = 160
NUM_TOP = 20
# Of two logits in float32 where the answers part. In bfloat16 each of them errs by 0.08 (root of the mean square), in
# transformers too: their difference is seldom wrong by more.
NEAR_TIE = 0.25
RATIO = 1.5


@pytest.fixture(scope="module")
def path() -> Path:
    named = os.environ.get("OCTAVO_DEMO_GGUF")
    return Path(named) if named else resolve_model("demo").path


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(str(path), device=DEVICE, dtype="bfloat16", kv_cache_memory=512 << 20, max_num_seqs=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def exact(path: Path) -> Any:
    """transformers' model in float32."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    checkpoint = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    loaded = model.load_state_dict(checkpoint["tensors"], strict=False)
    assert loaded.missing_keys == ["lm_head.weight"]
    assert not loaded.unexpected_keys
    return model.to(DEVICE).eval()


@pytest.fixture(scope="module")
def rounded(exact: Any) -> Any:
    """transformers' model in bfloat16, its rotary tables left in float32 as transformers leaves them when it loads."""
    twin = copy.deepcopy(exact).to(torch.bfloat16)
    for name, buffer in exact.named_buffers():
        parent, _, leaf = name.rpartition(".")
        setattr(twin.get_submodule(parent), leaf, buffer.clone())
    return twin


def logprobs_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """float32 [tokens, vocabulary]."""
    with torch.inference_mode():
        return model(torch.tensor([tokens], device=DEVICE)).logits[0].float().log_softmax(-1).cpu()


def texts() -> list[list[int]]:
    """Prompts and answers of the reference, from short to long."""
    chosen = (0, 13, 22, 43, 49)
    return [(GOLDEN[number]["prompt"] + GOLDEN[number]["tokens"])[:MOST_POSITIONS] for number in chosen]


def test_logits_err_no_more_than_transformers(llm: LLM, exact: Any, rounded: Any) -> None:
    """Compared at the tokens that Octavo reports, the likeliest ones of every position."""
    mine: list[float] = []
    twins: list[float] = []
    for tokens in texts():
        prefixes = [tokens[: length + 1] for length in range(len(tokens))]
        outputs = llm.generate(prefixes, SamplingParams(temperature=0, max_tokens=1, logprobs=NUM_TOP), use_tqdm=False)
        true, twin = logprobs_of(exact, tokens), logprobs_of(rounded, tokens)
        for position, output in enumerate(outputs):
            entries = output.outputs[0].logprobs
            assert entries is not None
            assert len(entries[0].top) == NUM_TOP
            for token, value in entries[0].top:
                mine.append(value - true[position, token].item())
                twins.append((twin[position, token] - true[position, token]).item())
    ours, theirs = torch.tensor(mine).abs(), torch.tensor(twins).abs()
    print(
        f"\n{ours.numel()} log probabilities against float32: Octavo mean {ours.mean():.4f} max {ours.max():.3f} "
        f"root of mean square {ours.square().mean().sqrt():.4f}; transformers in bfloat16 mean {theirs.mean():.4f} "
        f"max {theirs.max():.3f} root of mean square {theirs.square().mean().sqrt():.4f}"
    )
    assert theirs.mean() > 0
    assert ours.mean() < RATIO * theirs.mean()
    assert ours.square().mean() < RATIO**2 * theirs.square().mean()
    # A maximum is one sample of the tail: held to the size of its like, not to the ratio of means.
    assert ours.max() < 2 * theirs.max()


def test_greedy_text_parts_only_at_near_ties(llm: LLM, exact: Any) -> None:
    chosen = GOLDEN[:: len(GOLDEN) // NUM_PROMPTS][:NUM_PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate([answer["prompt"] for answer in chosen], params, use_tqdm=False)
    equal, lines, wide = 0, [], []
    for answer, output in zip(chosen, outputs, strict=True):
        got, wanted = output.outputs[0].token_ids, answer["tokens"][:NUM_TOKENS]
        assert len(got) == NUM_TOKENS
        place = next((place for place, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b), None)
        if place is None:
            equal += 1
            continue
        values = logprobs_of(exact, answer["prompt"] + wanted[:place])[-1]
        margin = (values[wanted[place]] - values[got[place]]).item()
        lines.append(f"  {answer['text'][:30]!r}: token {place}, margin {margin:.4f}")
        if not margin < NEAR_TIE:
            wide.append(lines[-1])
    print(f"\n{equal} of {len(chosen)} texts of {NUM_TOKENS} tokens equal float32's; the others part where its two")
    print("\n".join(["likeliest logits are so near:", *lines]))
    assert not wide, "\n".join(wide)
    assert equal >= len(chosen) // 3
