"""A Llama small enough to load in a moment, of random weights, written without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_SPECIAL = ("<unk>", "<s>", "</s>")
VOCAB_SIZE = len(_SPECIAL) + 256
_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS, _HEAD = 64, 96, 2, 2, 1, 32


def write_tiny_llama(folder: Path, seed: int) -> Path:
    """Write one; another seed is another model, which answers otherwise."""
    folder.mkdir()
    random = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return random.normal(0, 0.15, shape).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": weight(VOCAB_SIZE, _HIDDEN),
        "lm_head.weight": weight(VOCAB_SIZE, _HIDDEN),
        "model.norm.weight": np.ones(_HIDDEN, np.float32),
    }
    for layer in range(_LAYERS):
        place = f"model.layers.{layer}."
        tensors |= {
            place + "input_layernorm.weight": np.ones(_HIDDEN, np.float32),
            place + "post_attention_layernorm.weight": np.ones(_HIDDEN, np.float32),
            place + "self_attn.q_proj.weight": weight(_HEADS * _HEAD, _HIDDEN),
            place + "self_attn.k_proj.weight": weight(_KV_HEADS * _HEAD, _HIDDEN),
            place + "self_attn.v_proj.weight": weight(_KV_HEADS * _HEAD, _HIDDEN),
            place + "self_attn.o_proj.weight": weight(_HIDDEN, _HEADS * _HEAD),
            place + "mlp.gate_proj.weight": weight(_INNER, _HIDDEN),
            place + "mlp.up_proj.weight": weight(_INNER, _HIDDEN),
            place + "mlp.down_proj.weight": weight(_HIDDEN, _INNER),
        }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    # A byte a token.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate((*_SPECIAL, *letters))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}), encoding="utf-8")
    return folder
