from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from octavo.loading.resolve import ModelSource, resolve_model


@pytest.fixture(scope="session")
def demo() -> ModelSource:
    return resolve_model("demo")


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """Makes a folder with a tiny random Llama, written by transformers; returns it with the model's own tensors."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(*, max_shard_size: str = "5GB", dtype: str = "float32", **changes: Any) -> tuple[Path, dict[str, Any]]:
        settings = {
            "vocab_size": 96,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
            **changes,
        }
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**settings)).to(getattr(torch, dtype))
        folder = tmp_path_factory.mktemp("checkpoint")
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        tensors = model.state_dict()
        if settings["tie_word_embeddings"]:
            del tensors["lm_head.weight"]
        return folder, tensors

    return make
