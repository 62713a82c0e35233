"""Tokenizers and models that do not agree, and texts that continue a prompt, through the whole engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from octavo import LLM, SamplingParams
from octavo.errors import InvalidRequest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL = ["<unk>", "<s>", "</s>"]


@pytest.fixture(scope="module")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Tokenizer, int], Path]:
    """A random model of so many embedding rows, beside a tokenizer."""

    def save(tokenizer: Tokenizer, vocab_size: int) -> Path:
        folder = tmp_path_factory.mktemp("model")
        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=256,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
        return folder

    return save


def test_a_token_without_a_row_in_the_embedding(save_model):
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(["<pad>"])
    folder = save_model(tokenizer, len(names))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<pad>"}))
    hot = SamplingParams(temperature=100.0, max_tokens=200, seed=1, ignore_eos=True, bad_words=["<pad>"])
    with LLM(str(folder), dtype="float32", kv_cache_memory="16MiB") as llm:
        assert len(names) not in llm.model.eos_token_ids
        output = llm.generate(["Hello"], hot)[0].outputs[0]
        assert max(output.token_ids) < len(names)
        with pytest.raises(InvalidRequest, match=r"token id 259 \('<pad>'\) is outside the vocabulary"):
            llm.generate(["Hello<pad>"], hot)
