"""The Rust extension: core, CPU kernels and model file headers.

Pointers are plain integers (`tensor.data_ptr()`). The caller keeps the memory alive, contiguous and in place for the
call, or as long as the docstring says.
"""

from typing import Any, final

__version__: str

def build_info() -> dict[str, str]:
    """Version, profile and target of the extension, for bug reports."""

# ---------------------------------------------------------------- the core (rust/core)

NUM_ARENAS: int
"""Plan arenas in the ring."""
PARAM_LEN: int
"""int32 values of a slot's sampling parameters."""
NUM_COUNTS: int
"""int32 values of the plan array `counts`."""
COUNTS: tuple[str, ...]
"""Names of the counts, in their order in the plan array `counts`; zeros fill the rest."""

@final
class TokenTable:
    """Token id to bytes, shared by every sequence of an engine."""

    def __new__(cls, token_bytes: list[bytes], flags: bytes, *, drop_leading_space: bool = False) -> TokenTable:
        """Build the table.

        Args:
            token_bytes: the bytes each id stands for, already decoded (byte-level BPE mapped back, `<0x0A>` as one
                byte, SentencePiece's mark as a space).
            flags: one byte an id; bit 0: special (control) token.
            drop_leading_space: the answer's very first space is dropped, as SentencePiece decoders do.
        """

    def __len__(self) -> int: ...
    def decode(self, token_ids: bytes, *, skip_special_tokens: bool = True) -> bytes:
        """UTF-8 text of int32 ids, exactly what the engine would stream for them as one answer."""

@final
class StepPlan:
    """One step: how much of each plan array is filled. The arrays themselves lie in the arena."""

    @property
    def step(self) -> int: ...
    @property
    def arena(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_decode_rows(self) -> int: ...
    @property
    def num_logits(self) -> int: ...
    @property
    def num_table_updates(self) -> int: ...
    @property
    def num_block_copies(self) -> int: ...
    @property
    def num_param_updates(self) -> int: ...
    @property
    def num_biases(self) -> int: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def max_query_len(self) -> int: ...
    @property
    def num_masks(self) -> int: ...

@final
class StepOutput:
    """The outputs of one committed step, an event a sampled token; every array as little-endian bytes."""

    @property
    def num_events(self) -> int: ...
    @property
    def request_ids(self) -> bytes:
        """int64[E]."""
    @property
    def sample_indices(self) -> bytes:
        """int32[E]: which of the request's n answers."""
    @property
    def logit_indices(self) -> bytes:
        """int32[E]: the token's place in the step's logits arrays (for log probabilities)."""
    @property
    def token_ids(self) -> bytes:
        """int32[E]."""
    @property
    def text_ends(self) -> bytes:
        """int32[E]: where the event's text ends in `text`; it begins where the one before ends."""
    @property
    def text(self) -> bytes:
        """UTF-8, all events in order."""
    @property
    def finish_reasons(self) -> bytes:
        """int32[E]: 0 not finished, 1 stop, 2 length."""
    @property
    def stop_reasons(self) -> bytes:
        """int32[E]: for finish reason 1 the stop token's id, or -1 - i for the i-th stop text; else -2147483648."""
    @property
    def cached_tokens(self) -> bytes:
        """int32[E]: prompt tokens found in the prefix cache at first admission."""
    @property
    def started(self) -> bytes:
        """int64[...]: ids of the requests that were scheduled for the first time, whether they have an event or not."""

def max_blocks_per_sequence(num_tokens: int, block_size: int, windows: list[int], max_num_batched_tokens: int) -> int:
    """Blocks that one sequence of `num_tokens` tokens holds at once, at most, in all cache groups together."""

@final
class Core:
    """Block pool, prefix cache, scheduler and sequences of one engine. Not thread safe: one loop calls it."""

    def __new__(
        cls,
        *,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: list[int],
        policy: str = "fcfs",
        aging_interval_us: int = 10_000_000,
        enable_prefix_caching: bool = True,
        hash_seed: int = 0,
        group_min_blocks: int = 0,
        windows: list[int] = ...,
        token_table: TokenTable | None = None,
    ) -> Core:
        """Create a core without requests.

        Args:
            num_blocks: blocks of the KV cache, the null block 0 included.
            group_min_blocks: decode rows that share at least this many first blocks form a group; 0 for no groups.
            windows: the window of each cache group in tokens, 0 for full attention; one full group by default.
            token_table: decodes answers to text; without it answers have no text.

        Raises:
            ConfigError: a value cannot work; the message names it and the remedy.
        """

    def layout(self) -> list[tuple[str, int, int]]:
        """(array name, offset, capacity) of every plan array in an arena, in int32 elements."""

    def arena_len(self) -> int:
        """int32 elements of one arena."""

    def attach(self, arenas: list[tuple[int, int]], results: list[tuple[int, int]], owner: object) -> None:
        """Set the NUM_ARENAS plan arenas and result buffers, each as (pointer, int32 elements).

        `owner` keeps them alive. The device writes the sampled ids of the step in arena a to result buffer a,
        int32[num_logits], before `commit`.

        Raises:
            ValueError: not NUM_ARENAS of each, one is too short, or one is not aligned to 4 bytes.
        """

    def submit(
        self,
        request_id: int,
        prompt_token_ids: bytes,
        *,
        arrival_us: int,
        n: int = 1,
        max_tokens: int,
        min_tokens: int = 0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int = 0,
        logprobs: int = -1,
        stop_token_ids: list[int] = ...,
        stop: list[bytes] = ...,
        ignore_eos: bool = False,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        begins_text: bool = False,
        priority: int = 0,
        cache_salt: bytes = b"",
        adapter: int = 0,
        logit_bias: list[tuple[int, float]] = ...,
        constrained: bool = False,
    ) -> None:
        """Queue a request. `prompt_token_ids` are int32 ids as bytes.

        Args:
            logit_bias: (token, value added to its logit), each token once, 1024 at most; -inf bans a token.
            constrained: every sample is constrained to a set of tokens, see `masked`.

        Raises:
            InvalidRequest: the prompt is empty, an id is outside the vocabulary, a value is out of range, or
                `request_id` is in use.
            ContextLengthExceeded: the prompt and one more token are longer than max_model_len.
            CapacityExceeded: the request needs more blocks than the KV cache has.
        """

    def plan(self) -> StepPlan | None:
        """Choose the next step and fill its arena; None when nothing can run now. At most one step may be open."""

    def commit(self, step: int) -> StepOutput:
        """Append the sampled ids of the oldest open step from its result buffer.

        Raises:
            ValueError: not the oldest open step.
        """

    def abort(self, request_id: int) -> bool:
        """End a request without an event; False when it is not known or has ended."""

    def masked(self) -> bytes:
        """int64[num_masks, 2]: (request id, sample index) of each constrained sample of the step planned last, in
        the order of `mask_logits`. All earlier tokens of these answers are committed."""

    def history(self, slot: int) -> bytes:
        """int32 ids of prompt and committed output of the sequence in a slot, as bytes."""

    def has_work(self) -> bool:
        """True while a request is waiting, running or in flight."""

    def stats(self) -> dict[str, int]:
        """Gauges and counters, by name."""

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that no sequence holds; how many."""

    def check_invariants(self) -> None:
        """Check the core's internal state (for tests).

        Raises:
            RuntimeError: the state contradicts itself.
        """

# ---------------------------------------------------------------- grammars (rust/grammar)

@final
class Vocabulary:
    """The tokens of one model as a trie, and the grammars compiled for them. Thread safe."""

    def __new__(cls, token_table: TokenTable, eos_token_ids: list[int], vocab_size: int) -> Vocabulary:
        """Build the trie, the GIL released: some tenths of a second for 150,000 tokens.

        Special and end tokens are never allowed by their bytes, nor are tokens longer than 1,000 bytes.

        Raises:
            UnsupportedModel: no end token, one outside the vocabulary, or more than 2**20 tokens.
        """

    def __len__(self) -> int:
        """Tokens, `vocab_size`."""

    def compile(self, kind: str, spec: str) -> Grammar:
        """Compile a specification, or find it among the 64 used last; the GIL released.

        Args:
            kind: "json" (a JSON schema), "json_object" (any object; spec is not read), "regex" (Rust's syntax, with
                ASCII's digits, words and blanks, and look-ahead at its start; the whole text matches), "choice" (a
                JSON list of texts) or "grammar" (Lark, or GBNF with `root ::=`).
            spec: the specification, 256 KiB at most.

        Parts of a JSON text are at most one space apart, or one line break and an indentation of 32 blanks.

        Raises:
            InvalidRequest: what is wrong with it, and where; or that compiling it takes too long.
            Overloaded: too many others are being compiled.
        """

@final
class Grammar:
    """A specification compiled for one vocabulary; immutable."""

@final
class Constraints:
    """The constraints of the running requests: a matcher for each answer. Thread safe; calls wait for each other."""

    def __new__(cls, vocabulary: Vocabulary) -> Constraints: ...
    def __len__(self) -> int:
        """Requests."""

    def __contains__(self, key: int, /) -> bool: ...
    def add(
        self,
        request_id: int,
        n: int,
        grammar: Grammar | None = None,
        allowed_token_ids: list[int] | None = None,
        bad_words: list[list[int]] | None = None,
    ) -> None:
        """Constrain the n answers of a request by any of the three together.

        Args:
            request_id: one that is not known yet.
            n: answers.
            grammar: what the text follows. Where it is complete end tokens are allowed; once it can only end, they
                alone are, from then on.
            allowed_token_ids: the only tokens that may be drawn; with a grammar, end tokens are allowed too.
            bad_words: token sequences; the last token of one is banned where the tokens before it were just drawn,
                unless nothing else is left.

        Raises:
            InvalidRequest: a token outside the vocabulary, an empty list of allowed tokens, a request that is known.
        """

    def remove(self, request_id: int) -> None:
        """Forget a request; nothing happens when it is not known."""

    def fill(self, keys: bytes, address: int, row_words: int) -> list[tuple[int, str]]:
        """Write the mask of each sample: bit t % 32 of word t // 32 is set where token t is allowed.

        Rows are filled in parallel on the CPU kernels' threads, the GIL released.

        Args:
            keys: int64[R, 2], `Core.masked()`: request id and sample index.
            address: int32[R, row_words], row k for the k-th key; what lies past the vocabulary becomes 0.
            row_words: ceil(vocab_size / 32) at least.

        Returns:
            (index of the row, reason) where a grammar cannot continue: it met a limit, or the tokens left
            cannot write what must come. Such rows allow end tokens only, and are reported once.

        Raises:
            ValueError: a null pointer, one not aligned to 4 bytes, rows too short, keys cut short.
        """

    def advance(self, frame: StepOutput) -> list[tuple[int, str]]:
        """Take the tokens of a frame's events; events of unknown requests are skipped.

        Returns:
            (index of the event, reason) as `fill`.
        """

# ---------------------------------------------------------------- model files (rust/formats)

def read_gguf(path: str) -> tuple[dict[str, Any], list[tuple[str, str, list[int], int, int]]]:
    """Check a GGUF file's header against the file's size.

    Returns:
        (metadata, tensors): metadata values as Python scalars, strings and lists; a tensor as (name, type such as
        "Q4_1", shape in torch's order, offset in the file, bytes).

    Raises:
        CorruptFile, UnsupportedModel, OSError.
    """

def read_safetensors(path: str) -> tuple[dict[str, str], list[tuple[str, str, list[int], int, int]]]:
    """Check a safetensors file's header against the file's size; as `read_gguf` (dtype such as "BF16")."""

def dequantize(source: int, num_bytes: int, kind: str, destination: int, num_elements: int, dtype: str) -> None:
    """Dequantize GGUF blocks of one type into `bfloat16` or `float32` memory, in parallel, the GIL released.

    Raises:
        ValueError: sizes that do not fit together. UnsupportedModel: unknown kind.
    """

# ---------------------------------------------------------------- CPU kernels (rust/cpu)

def cpu_info() -> dict[str, Any]:
    """{"isa": "avx512_bf16" | "avx512" | "avx2" | "neon" | "portable", "isas": [...all usable here],
    "bf16_native": bool, "num_threads": int, "physical_cores": int}."""

def cpu_set_num_threads(num_threads: int) -> None:
    """Threads of every CPU kernel; results do not depend on it."""

def cpu_set_isa(isa: str) -> None:
    """Force a slower instruction set (tests). Packed weights made before are invalid afterwards."""

@final
class PackedLinear:
    """A dense layer's weight [N, K], packed for the CPU kernels; one arithmetic at every row count."""

    def __new__(cls, parts: list[tuple[int, int, str, int]], k: int, dtype: str, *, bias: int = 0) -> PackedLinear:
        """Pack row-major parts stacked along N.

        Args:
            parts: (pointer, bytes, kind, rows); kind is "F32", "F16", "BF16" or a GGUF block type, dequantized on the
                way. The memory is not needed afterwards.
            k: columns.
            dtype: "bfloat16" or "float32": what is stored, and the activations' dtype.
            bias: pointer to float32[N], copied; 0 for none.
        """

    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def forward(self, x: int, out: int, rows: int, *, out_float32: bool = False) -> None:
        """out[rows, N] = x[rows, K] @ weight.T (+ bias), float32 accumulation in a fixed order of K; GIL released.

        `out` has the dtype of x, or float32.
        """

    def embed(self, token_ids: int, out: int, rows: int) -> None:
        """out[rows, K] = weight[token_ids] (int32 ids, checked against N)."""

def cpu_rms_norm(
    x: int, weight: int, out: int, rows: int, n: int, eps: float, dtype: str, *, residual: int = 0
) -> None:
    """out = rms_norm(x) * weight, a row at a time in float32; weight float32[n].

    With `residual`: residual += x first (rounded to dtype), and the sum is what is normed.
    """

def cpu_act_and_mul(gate_up: int, out: int, rows: int, n: int, activation: str, dtype: str) -> None:
    """out[rows, n] = activation(gate_up[:, :n]) * gate_up[:, n:]; "silu", "gelu" or "gelu_tanh"."""

def cpu_rope_and_cache(
    qkv: int,
    kv_cache: int,
    positions: int,
    slot_mapping: int,
    cos_sin: int,
    tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    dtype: str,
    *,
    q_norm: int = 0,
    k_norm: int = 0,
    eps: float = 0.0,
) -> None:
    """Per-head q/k norm (when given, float32[head_dim]), rotary on q (in place) and k, and k, v into their slots.

    qkv [tokens, (num_heads + 2 * num_kv_heads) * head_dim]; cos_sin float32 [positions, rotary_dim]: cosines, then
    sines; kv_cache one layer, [blocks, 2, num_kv_heads, block_size, head_dim] in the order within a block that
    `cpu_attention` reads (opaque); slot < 0 writes nothing.
    """

def cpu_attention(
    qkv: int,
    qkv_stride: int,
    out: int,
    kv_cache: int,
    block_tables: int,
    table_stride: int,
    rows: int,
    query_start: int,
    seq_lens: int,
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    scale: float,
    dtype: str,
    *,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """Causal attention over the blocks where they lie, decode and prefill rows in one call; GIL released.

    Row r covers queries query_start[r] to query_start[r + 1] (the last tokens of the sequence), keys 0 to seq_lens[r],
    blocks block_tables[rows[r]]. q are the first num_heads * head_dim columns of qkv. A query's result depends on its
    own sequence alone, bit for bit: not on the batch, the chunking of its prompt, or the number of threads.
    """

def cpu_sample(
    logits: int,
    num_logits: int,
    vocab_size: int,
    stride: int,
    params: int,
    slots: int,
    positions: int,
    counts: int,
    count_stride: int,
    out_ids: int,
    out_logprobs: int,
    out_top_ids: int,
    out_top_logprobs: int,
    max_logprobs: int,
    first_logit: int = 0,
    num_masks: int = 0,
    mask_logits: int = 0,
    masks: int = 0,
    mask_words: int = 0,
    num_biases: int = 0,
    bias_logits: int = 0,
    bias_tokens: int = 0,
    bias_values: int = 0,
) -> None:
    """Sample every row of float32 logits[num_logits, stride] (changed in place).

    params int32 [slots, 16] as the plan's `param_values`; slots int32[num_logits]; positions int32[num_logits]: place
    of the new token in its sequence; counts int32 [slots, count_stride]: output count of each token, bit 30 set where
    the prompt holds it (0 when no row has penalties). Greedy ties go to the lowest id; noise is a hash of (seed, sample
    index, position, token). Log probabilities are those of the logits before penalties and temperature (written for
    rows that ask): the chosen one's to out_logprobs float32[num_logits], the likeliest to out_top_ids int32 and
    out_top_logprobs float32 [num_logits, max_logprobs].

    Before all of that, and of all else, rows are held to what they may choose of: mask_logits int32[num_masks] are the
    rows of masks int32 [num_masks, mask_words], where bit t % 32 of word t // 32 is set if token t is allowed; the
    others' logits become -inf. bias_values float32[num_biases] are added to the logits of (bias_logits, bias_tokens)
    int32, no two alike; -inf bans. Both count rows from `first_logit` rows before the first of `logits`, and may name
    rows that are not among these.
    """
