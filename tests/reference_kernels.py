"""Plain-torch references of the kernels: the same meaning, written to be read and not to be fast.

The KV cache here keeps its natural order, [blocks, 2, num_kv_heads, block_size, head_dim]; the CPU kernels lay a
block out for their vectors. Integer tensors are int32 or int64; arithmetic is float32 (float64 where said), with
results rounded to the inputs' dtype at the same places as in the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from octavo.kernels.token_counts import PROMPT_BIT
from torch import Tensor

_MASK = 0xFFFFFFFF


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of weight [N, K] for token_ids [T]: [T, K]."""
    return weight[token_ids.long()]


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """RMS norm of x [rows, n] in float32, times weight float32[n].

    Returns:
        (out, residual): both of x's dtype; with a residual [rows, n], x is added to it first (rounded) and the sum is
        what is normed.
    """
    if residual is not None:
        residual = residual + x
        x = residual
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.to(x.dtype).float() * weight).to(x.dtype), residual


def act_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up of gate_up [rows, 2n]: [rows, n]; "silu", "gelu" or "gelu_tanh"."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    approximate = {"gelu": "none", "gelu_tanh": "tanh"}[activation]
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first 2 * cos.shape[-1] dimensions of x [T, heads, head_dim] (float32) by angles [T, rotary_dim / 2]."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = turned[..., :half], turned[..., half:]
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def rope_and_cache(
    qkv: Tensor,
    kv_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin: Tensor,
    num_heads: int,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Norm and turn q (in place) and k, put k and v into their slots.

    Args:
        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim].
        kv_cache: [blocks, 2, num_kv_heads, block_size, head_dim], of the dtype of qkv or float8_e4m3fn.
        positions: int [T].
        slot_mapping: int [T], block * block_size + offset; below 0: nothing is written.
        cos_sin: float32 [positions, rotary_dim], cosines then sines.
        num_heads: query heads.
        q_norm: float32[head_dim], the weight of an RMS norm of every query head; None for none.
        k_norm: the same for keys.
        eps: of these norms.
    """
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    q, k = heads[:, :num_heads], heads[:, num_heads:-num_kv_heads]
    v = heads[:, -num_kv_heads:]
    cos, sin = cos_sin[positions.long()].chunk(2, dim=-1)

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            x = rms_norm(x, weight, eps)[0]
        return rotate(x.float(), cos, sin).to(x.dtype)

    k = turned(k, k_norm)
    q.copy_(turned(q, q_norm))
    written = slot_mapping >= 0
    slots = slot_mapping[written].long()
    block, offset = slots // block_size, slots % block_size

    def stored(x: Tensor) -> Tensor:
        if kv_cache.dtype != torch.float8_e4m3fn:
            return x
        return x.float().clamp(-448, 448).to(kv_cache.dtype)

    kv_cache[block, 0, :, offset] = stored(k[written])
    kv_cache[block, 1, :, offset] = stored(v[written])


def attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Causal attention of ragged rows over a paged cache, in float64.

    Args:
        q: [T, num_heads, head_dim].
        kv_cache: [blocks, 2, num_kv_heads, block_size, head_dim].
        block_tables: int [slots, blocks of a sequence].
        rows: int [R], slot of each row.
        query_start: int [R + 1], first token of each row.
        seq_lens: int [R], keys of each row; its queries are the last of them.
        scale: factor of the scores.
        window: last positions a query sees, itself among them; 0 for all.
        softcap: scores become softcap * tanh(score / softcap); 0 for none.

    Returns:
        float64 [T, num_heads, head_dim].
    """
    num_heads = q.shape[1]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row, slot in enumerate(rows.tolist()):
        first, end = query_start[row : row + 2].tolist()
        length = int(seq_lens[row])
        if first == end:
            continue
        blocks = block_tables[slot, : -(-length // block_size)].long()
        # [2, kv heads, length, head_dim]
        sequence = kv_cache[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length].double()
        keys, values = sequence.repeat_interleave(num_heads // num_kv_heads, dim=1)
        scores = torch.einsum("qhd,hkd->hqk", q[first:end].double(), keys) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(length - (end - first), length)[:, None]
        key = torch.arange(length)[None]
        hidden = key > position
        if window > 0:
            hidden |= key <= position - window
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        out[first:end] = torch.einsum("hqk,hkd->qhd", weights, values)
    return out


# ---------------------------------------------------------------- sampling


def _mix(h: Tensor) -> Tensor:
    """The finalizer of MurmurHash3 on 32-bit words (in int64 tensors)."""
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B & _MASK
    h = h ^ (h >> 13)
    # The product of two 32-bit words may pass 2^63: the low half is all that counts.
    h = h * 0xC2B2AE35 & _MASK
    return h ^ (h >> 16)


def noise_bits(seed: int, sample_index: int, position: int, token_ids: Tensor) -> Tensor:
    """The 32 random bits of each token [n] at one place of one answer: int64 [n] of 0 to 2^32 - 1.

    Two keys are hashed from the words (seed low, seed high, sample index, position), then each token with both.
    """
    keys = []
    for start in (0x243F6A88, 0x85A308D3):
        key = torch.tensor(start)
        for word in (seed & _MASK, seed >> 32 & _MASK, sample_index & _MASK, position & _MASK):
            key = (_mix(key ^ word) * 5 + 0xE6546B64) & _MASK
        keys.append(key)
    return _mix((_mix(token_ids.long() ^ keys[0]) + keys[1]) & _MASK)


def gumbel(bits: Tensor) -> Tensor:
    """Gumbel noise of 32 random bits: -ln(-ln((bits + 1/2) / 2^32)) in float64, rounded to float32."""
    uniform = (bits.double() + 0.5) / 2.0**32
    return (-torch.log(-torch.log(uniform))).float()


def constrain(logits: Tensor, masks: dict[int, Tensor], biases: Sequence[tuple[int, int, float]]) -> Tensor:
    """Logits [R, V] of what rows may choose of, before all else that sampling does.

    Args:
        logits: float32 [R, V].
        masks: by row, int32 [ceil(V / 32)]: where bit t % 32 of word t // 32 is not set, token t becomes -inf.
        biases: (row, token, what is added to its logit), no row and token twice; -inf makes any logit -inf.
    """
    logits = logits.clone()
    for row, words in masks.items():
        allowed = (words[:, None] >> torch.arange(32, dtype=torch.int32) & 1).flatten()[: logits.shape[1]]
        logits[row, allowed == 0] = -math.inf
    for row, token, value in biases:
        logits[row, token] = -math.inf if value == -math.inf else logits[row, token] + value
    return logits


def apply_penalties(logits: Tensor, counts: Tensor, repetition: float, presence: float, frequency: float) -> Tensor:
    """Penalized logits [V] of one row.

    counts int32[V]: output count of each token, bit 30 set where the prompt holds it. Repetition divides (or, below 0,
    multiplies) the logit of what was in prompt or output; frequency and presence are taken off for the output.
    """
    output = counts & (PROMPT_BIT - 1)
    factor = torch.tensor(repetition, dtype=torch.float32)
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(counts != 0, repeated, logits)
    logits = logits - output.float() * torch.tensor(frequency, dtype=torch.float32)
    return logits - (output > 0).float() * torch.tensor(presence, dtype=torch.float32)


def ranked(logits: Tensor) -> Tensor:
    """Ids by falling logit, ties by rising id; NaN and -inf are left out."""
    order = torch.sort(logits.nan_to_num(nan=-math.inf, posinf=math.inf), descending=True, stable=True).indices
    return order[logits[order] > -math.inf]


def allowed(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Ids that may be drawn, likeliest first.

    The top_k likeliest; of these the fewest whose probability (after temperature, among the top k) reaches top_p; of
    these the ones at least min_p times as likely as the likeliest. Ties go to the lower id.
    """
    order = ranked(logits)
    if top_k > 0:
        order = order[:top_k]
    scaled = (logits[order] - logits[order[0]]) / torch.tensor(temperature, dtype=torch.float32)
    if top_p < 1:
        mass = scaled.double().exp().cumsum(0)
        reached = int((mass < float(torch.tensor(top_p, dtype=torch.float32)) * mass[-1]).sum()) + 1
        order, scaled = order[:reached], scaled[:reached]
    if min_p > 0:
        bound = torch.tensor(min_p, dtype=torch.float32).double().log().float()
        order = order[scaled >= bound]
    return order


def greedy(logits: Tensor) -> int:
    """The likeliest id of logits [V], the lowest at ties; NaN never wins, 0 where all are NaN."""
    numbers = torch.nonzero(~logits.isnan()).flatten()
    if len(numbers) == 0:
        return 0
    values = logits[numbers]
    return int(numbers[torch.nonzero(values == values.max()).flatten()[0]])


def sample(
    logits: Tensor,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    sample_index: int = 0,
    position: int = 0,
) -> int:
    """Draw an id from float32 logits [V] (penalties already applied): the largest of scaled logit plus noise."""
    best = greedy(logits)
    if temperature < 1e-5 or not math.isfinite(float(logits[best])):
        return best
    ids = allowed(logits, temperature, top_k, top_p, min_p)
    scaled = (logits[ids] - logits[best]) / torch.tensor(temperature, dtype=torch.float32)
    score = scaled + gumbel(noise_bits(seed, sample_index, position, ids))
    return int(ids[score == score.max()].min())


def logprobs(logits: Tensor) -> Tensor:
    """Log probabilities of logits [V], in float64."""
    return torch.log_softmax(logits.double(), dim=-1)
