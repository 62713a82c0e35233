"""Tokenizers and models that do not agree, and texts that continue a prompt, through the whole engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from octavo import LLM, SamplingParams
from octavo.errors import InvalidRequest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
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


def sentencepiece_like(decoder: decoders.Decoder) -> Tokenizer:
    """A tokenizer that writes a space before a text, and a decoder that drops it."""
    letters = "abcdefghijklmnopqrstuvwxyzTCFP"
    names = [*SPECIAL, "▁", *letters, "Pa", "Par", "Pari", "Paris", "▁Paris"]
    merges = [("P", "a"), ("Pa", "r"), ("Par", "i"), ("Pari", "s"), ("▁", "Paris")]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


STRIP = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1)]
)
CHAT = "{% for message in messages %}{{ message.role + message.content + '</s>' }}{% endfor %}"


@pytest.mark.parametrize("decoder", [STRIP, decoders.Metaspace()], ids=["strip", "metaspace"])
def test_output_continues_the_prompt(save_model, decoder):
    tokenizer = sentencepiece_like(decoder)
    folder = save_model(tokenizer, tokenizer.get_vocab_size())
    (folder / "chat_template.jinja").write_text(CHAT)
    paris = tokenizer.token_to_id("▁Paris")
    params = SamplingParams(temperature=0, max_tokens=2, logit_bias={paris: 100})
    with LLM(str(folder), dtype="float32", kv_cache_memory="16MiB") as llm:
        for prompt in ["The capital of France is", "a", "Paris Paris"]:
            ids = tokenizer.encode(prompt).ids
            for asked in [prompt, {"prompt_token_ids": ids}]:
                output = llm.generate([asked], params)[0].outputs[0]
                assert prompt + output.text == tokenizer.decode(ids + list(output.token_ids)) == f"{prompt} Paris Paris"
        # Special tokens are no text, so the output begins one.
        output = llm.generate([{"prompt_token_ids": [1]}], params)[0].outputs[0]
        assert output.text == tokenizer.decode([1, paris, paris]) == "Paris Paris"
        stopping = SamplingParams(temperature=0, max_tokens=3, logit_bias={paris: 100}, stop=[" Paris"])
        assert llm.generate(["The"], stopping)[0].outputs[0].text == ""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "is"}]
        assert llm.chat(messages, params)[0].outputs[0].text == "Paris Paris"
        assert llm.chat(messages, params, continue_final_message=True)[0].outputs[0].text == " Paris Paris"
        choice = SamplingParams(temperature=0, max_tokens=3, structured_outputs={"choice": ["Paris"]})
        assert llm.generate(["The"], choice)[0].outputs[0].text == "Paris"
