"""A decoder: embedding, blocks, final norm and head, run over one step's tokens."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from octavo.layers.block import PreNormBlock
from octavo.layers.kv_cache import KvCacheLayout
from octavo.layers.parameter import check_tensors
from octavo.layers.workspace import Stream, Workspace

if TYPE_CHECKING:
    from octavo.layers.backend import Backend, KvCache, Memory, StepInputs
    from octavo.layers.embedding import Embedding, Head
    from octavo.layers.norm import Norm
    from octavo.layers.parameter import Parameter, Weights
    from octavo.layers.rope import Rope

__all__ = ["Decoder"]


class Decoder:
    """A causal language model.

    A family builds one from its blocks. It takes no memory then: parameters, cache specs and scratch can be asked for
    first. `load` brings the weights to a device and `bind` takes all scratch, so a step allocates nothing.

    Args:
        architecture: Hugging Face's name of the class.
        embedding: of the tokens.
        blocks: in order.
        final_norm: before the head.
        head: gives the logits.
        ignored: beginnings of the names of tensors that the model does not need.
        prefixes: of names in some files of the family, and what they stand for.

    Attributes:
        num_bytes: of the loaded weights and tables.
        backend: the device, once loaded.
    """

    def __init__(
        self,
        architecture: str,
        embedding: Embedding,
        blocks: Sequence[PreNormBlock],
        final_norm: Norm,
        head: Head,
        ignored: Sequence[str] = (),
        prefixes: Mapping[str, str] | None = None,
    ) -> None:
        self.architecture = architecture
        self.embedding = embedding
        self.blocks = list(blocks)
        self.final_norm = final_norm
        self.head = head
        self.ignored = tuple(ignored)
        self.prefixes = dict(prefixes or {})
        self.num_bytes = 0
        self.backend: Backend
        self._layout: KvCacheLayout | None = None

    # ------------------------------------------------------------------ what it is

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, and logits of a row."""
        return self.head.vocab_size

    @property
    def position_limit(self) -> int:
        """Tokens of one sequence that the model's positions allow."""
        return min(rope.spec.position_limit for rope in self._long_ropes)

    @property
    def stretched_limit(self) -> int:
        """Tokens of one sequence that a user may ask for, see `RotarySpec.stretched_limit`."""
        return min(rope.spec.stretched_limit for rope in self._long_ropes)

    @property
    def _long_ropes(self) -> list[Rope]:
        """The tables of layers with full attention, if there are any: a window's distances stay short."""
        full = [block.attention.rope for block in self.blocks if not block.attention.spec.window]
        return full or self.ropes

    @property
    def ropes(self) -> list[Rope]:
        """The rotary tables, each once."""
        return list(dict.fromkeys(block.attention.rope for block in self.blocks))

    @property
    def windows(self) -> list[int]:
        """The windows of its layers, each once, in order; 0 for full attention."""
        return sorted({block.attention.spec.window for block in self.blocks})

    @property
    def cache_layout(self) -> KvCacheLayout:
        """Layout of the layers in the KV cache."""
        return self._layout or KvCacheLayout.of([block.attention.spec.cache for block in self.blocks])

    def parameters(self) -> Iterator[Parameter]:
        """Every tensor, in the order of use."""
        yield from self.embedding.parameters()
        for rope in self.ropes:
            yield from rope.parameters()
        for block in self.blocks:
            yield from block.parameters()
        yield from self.final_norm.parameters()
        yield from self.head.parameters()

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(parameter.size for parameter in self.parameters())

    def weights_bytes(self, itemsize: int, num_positions: int) -> int:
        """Bytes of the weights in a dtype of `itemsize` bytes, and of the rotary tables."""
        tables = sum(rope.num_bytes(num_positions) for rope in self.ropes)
        return sum(parameter.num_bytes(itemsize) for parameter in self.parameters()) + tables

    def workspace(self, max_tokens: int, head_rows: int, mlp_rows: int) -> Workspace:
        """A dry run of `bind`, which says what scratch a step of these bounds needs."""
        workspace = Workspace()
        self._bind(workspace, max_tokens, head_rows, mlp_rows)
        return workspace

    def representative(self) -> Decoder:
        """A copy with one block of each kind, and one more: of the last, only rows that sample are finished.

        For compiling every kernel of a step without the whole model; call it before `load`.
        """
        kinds = {block.attention.spec: index for index, block in enumerate(self.blocks)}
        chosen = list(kinds.values())
        twin = copy.copy(self)
        # Each block once, and the first again as a block of its own.
        twin.blocks = [self.blocks[index] for index in chosen] + [copy.copy(self.blocks[chosen[0]])]
        # As many cache groups as the whole model has: kernels are compiled for their number.
        layout = self.cache_layout
        places = tuple(layout.places[index] for index in [*chosen, chosen[0]])
        twin._layout = dataclasses.replace(layout, places=places)
        return copy.deepcopy(twin)

    # ------------------------------------------------------------------ loading

    def load(
        self,
        weights: Weights,
        backend: Backend,
        *,
        num_positions: int,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """Check the tensors and bring them to the device.

        Args:
            weights: where the tensors lie.
            backend: the device.
            num_positions: the longest sequence served, for the rotary tables.
            progress: told of the blocks done, and how many there are.

        Raises:
            ModelError: tensors that are missing, unknown or of another shape.
        """
        ignored = (*self.ignored, self.head.name) if self.head.tied else self.ignored
        check_tensors(list(self.parameters()), weights, self.architecture, ignored)
        self.backend = backend

        def report(done: int) -> None:
            if progress is not None:
                progress("weights", done, len(self.blocks) + 1)

        report(0)
        self.embedding.load(weights, backend)
        self.head.load(weights, backend)
        for rope in self.ropes:
            rope.load(weights, backend, num_positions)
        for done, block in enumerate(self.blocks, start=1):
            report(done)
            block.load(weights, backend)
        self.final_norm.load(weights, backend)
        report(len(self.blocks) + 1)
        self.num_bytes = backend.loaded_bytes

    def bind(self, max_tokens: int, head_rows: int) -> None:
        """Take all scratch of a step.

        Args:
            max_tokens: of one step.
            head_rows: logits rows computed at once, at most.
        """
        sizes = self.workspace(max_tokens, head_rows, self.backend.mlp_rows).sizes
        # Buffers may be mere addresses: this keeps their memory.
        self._workspace = Workspace(self.backend, sizes)
        self._bind(self._workspace, max_tokens, head_rows, self.backend.mlp_rows)

    def _bind(self, workspace: Workspace, max_tokens: int, head_rows: int, mlp_rows: int) -> None:
        self.head_rows = head_rows
        hidden_size = self.final_norm.size
        q_size = max(block.attention.spec.q_size for block in self.blocks)
        mlp_rows = min(mlp_rows, max_tokens)
        self._stream = Stream.of(workspace, "", max_tokens, hidden_size, q_size, mlp_rows)
        head = self._head_stream = Stream.of(workspace, "head_", head_rows, hidden_size, q_size, mlp_rows)
        # Where every token samples, nothing is gathered: the head's own buffers take over after attention.
        self._whole_stream = dataclasses.replace(head, residual=self._stream.residual, attended=self._stream.attended)
        previous: PreNormBlock | None = None
        for block, (group, _) in zip(self.blocks, self.cache_layout.places, strict=True):
            block.bind(workspace, max_tokens, mlp_rows, group, previous)
            previous = block
        self.head.bind(workspace, head_rows)
        self._num_tokens = 0

    # ------------------------------------------------------------------ a step

    def forward(self, inputs: StepInputs, cache: KvCache) -> None:
        """Run the blocks over the step's tokens; keys and values go to the cache before they are read.

        What the last block does after its attention is left to `compute_logits`: most rows of a prompt do not need it.
        """
        stream, rows = self._stream, inputs.num_tokens
        self._num_tokens = rows
        self.embedding.forward(inputs.token_ids, stream.residual, stream.residual_memory, rows)
        unfinished: PreNormBlock | None = None
        for block, layer_cache in zip(self.blocks, cache.layers, strict=True):
            if unfinished is not None:
                unfinished.finish(stream, rows)
            block.attend(stream, layer_cache, inputs)
            unfinished = block

    def compute_logits(self, indices: Memory | None) -> Memory:
        """Finish the last block for some tokens of the last `forward`, and take their logits.

        Args:
            indices: int32[n] into the step's tokens, on the device; n at most `head_rows`. None: all of them, in order.

        Returns:
            float32 [n, vocab_size], overwritten by the next call.
        """
        stream, head, last = self._stream, self._head_stream, self.blocks[-1]
        if indices is None:
            rows, head = self._num_tokens, self._whole_stream
        else:
            rows = indices.shape[0]
            self.backend.gather(stream.attended_memory, indices, head.attended_memory[:rows])
            self.backend.gather(stream.residual_memory, indices, head.residual_memory[:rows])
        last.finish(head, rows)
        self.final_norm.add(head.hidden, head.residual, head.normed, rows, last.output_norm)
        return self.head.forward(head.normed, rows)
