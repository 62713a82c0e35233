"""Drives a decoder on a GPU (or interpreted) step by step, as `DecoderDriver` does on a CPU."""

from __future__ import annotations

import numpy as np
import torch
from decoder_driver import MAX_TOKENS, TABLE_STRIDE, DecoderDriver
from octavo.kernels.attention_plan import plan_attention
from octavo.kernels.attention_work import AttentionWork
from octavo.layers.backend import IntArray
from octavo.layers.backends.cuda import CudaBackend, attention_shape
from octavo.layers.backends.cuda_inputs import CudaStepInputs, StepKind, has_groups, has_prompts
from octavo.layers.decoder import Decoder
from octavo.layers.parameter import Weights

PADDING = 3


class CudaDriver(DecoderDriver):
    """As `DecoderDriver`; every step is larger than its tokens, as in a graph.

    Attributes:
        shared_blocks: first blocks that all decode rows of a step share; given to the kernels as one group if above 0.
    """

    def __init__(
        self,
        decoder: Decoder,
        weights: Weights,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        kv_cache_dtype: str = "auto",
        block_size: int = 16,
    ) -> None:
        self.device = device
        self.kv_cache_dtype = kv_cache_dtype
        self.shared_blocks = 0
        super().__init__(decoder, weights, backend="cuda", dtype=dtype, block_size=block_size)
        slots = len(self.lengths)
        self.works = {}
        for spec in {block.attention.spec for block in decoder.blocks}:
            shape = attention_shape(spec, block_size, kv_fp8=kv_cache_dtype != "auto")
            length = TABLE_STRIDE * block_size
            self.works[spec.window] = AttentionWork(slots, length, MAX_TOKENS, shape, spec.window, device)

    def _make_backend(self, backend: str, dtype: torch.dtype, block_size: int) -> CudaBackend:
        return CudaBackend(dtype, block_size, self.device, self.kv_cache_dtype)

    def _place(self, values: IntArray, size: int = 0, padding: int = 0) -> torch.Tensor:
        padded = np.full(max(size, len(values)), padding, dtype=np.int32)
        padded[: len(values)] = values
        return torch.from_numpy(padded).to(self.device)

    def _logits(self, plan: dict[str, IntArray], num_decode_rows: int) -> torch.Tensor:
        num_tokens, num_rows = len(plan["token_ids"]), len(plan["rows"])
        tokens = min(num_tokens + PADDING, MAX_TOKENS)
        rows = min(tokens, len(self.lengths))
        grouped = self.shared_blocks > 0
        kind: StepKind
        if num_rows == num_decode_rows:
            kind = "grouped" if grouped else "decode"
        else:
            kind = "mixed_grouped" if grouped else "mixed"
        counts = np.zeros(16, dtype=np.int32)
        counts[:4] = num_tokens, num_rows, num_decode_rows, num_tokens
        counts[8] = int(grouped)
        slot_mappings, block_tables = self.groups(plan)
        inputs = CudaStepInputs(
            token_ids=self._place(plan["token_ids"], tokens),
            positions=self._place(plan["positions"], tokens),
            slot_mappings=[self._place(slots, tokens, -1) for slots in slot_mappings],
            rows=self._place(plan["rows"], rows, 1 << 30),
            seq_lens=self._place(plan["seq_lens"], rows, 1 << 30),
            query_start=self._place(plan["query_start"], rows + 1, 1 << 30),
            block_tables=[torch.from_numpy(tables).to(self.device) for tables in block_tables],
            table_stride=TABLE_STRIDE,
            num_tokens=tokens,
            num_rows=rows,
            num_decode_rows=0 if has_prompts(kind) else rows,
            kind=kind,
            counts=self._place(counts),
            group_rows=self._place(np.arange(num_decode_rows, dtype=np.int32), rows),
            group_starts=self._place(np.array([0, num_decode_rows], dtype=np.int32), rows + 1),
            group_blocks=self._place(np.array([self.shared_blocks], dtype=np.int32), rows),
            logits_rows=self._place(np.arange(num_tokens, dtype=np.int32), tokens),
            logits_slots=self._place(np.zeros(num_tokens, dtype=np.int32), tokens),
            works=self.works,
        )
        for work in self.works.values():
            plan_attention(
                inputs.counts,
                inputs.rows,
                inputs.query_start,
                inputs.seq_lens,
                inputs.group_rows,
                inputs.group_starts,
                inputs.group_blocks,
                work,
                rows=rows,
                grouped=has_groups(kind),
                mixed=has_prompts(kind),
            )
        self.decoder.forward(inputs, self.cache)
        return self.decoder.compute_logits(inputs.logits_rows)[:num_tokens].cpu().clone()
