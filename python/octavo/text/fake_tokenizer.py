"""The tokenizer of `load_format` `fake`: needs no file, and cuts its own passage into words."""

from __future__ import annotations

from octavo.text.parts import TokenizerParts
from octavo.text.token_bytes import byte_alphabet
from octavo.text.tokenizer import Tokenizer

__all__ = ["PASSAGE", "fake_tokenizer"]

PASSAGE = (
    " It was the year when the old lighthouse keeper learned to bake bread. Every morning he lit the stove, opened the"
    " window to the sea and read the letters that the boat had brought. Some came from a café in Zürich, some from a"
    " friend in 東京, and one, with a drawing of a whale 🐳, from a child in 서울. He answered all of them with care,"
    " because a letter, he said, is the only ship that never sinks. In the evening the lamp turned and turned, the"
    " gulls were silent, and the bread was gone. The price of flour rose to 3 € a bag; he wrote that down too and"
    " laughed. Nothing much happened on the island, and yet each day was full: there was wood to cut, glass to clean, a"
    " clock to wind, a garden to water. When the storm came in autumn he counted the seconds between light and thunder,"
    " and the number was always small. “Déjà vu,” he told the cat 🐈. The cat did not answer. Then spring returned with"
    " its ferries, its visitors and its questions, and he told them this story from the beginning:"
)
"""The text of a fake model: ASCII words, and characters of two, three and four bytes."""

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def fake_tokenizer() -> Tokenizer:
    """Byte-level pair encoding over 256 bytes, three control tokens, and the passage's words with their beginnings.

    Other text is a token a byte. `<|im_end|>` ends an answer.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    vocabulary = {letters[byte]: byte for byte in range(256)}
    vocabulary |= {text: 256 + index for index, text in enumerate(_SPECIAL)}
    merges: list[tuple[str, str]] = []
    space = letters[ord(" ")]
    for word in dict.fromkeys(word for word in PASSAGE.split() if word.isascii() and word.isalpha()):
        left = space
        for letter in word:
            if left + letter not in vocabulary:
                vocabulary[left + letter] = len(vocabulary)
                merges.append((left, letter))
            left += letter
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    return Tokenizer(
        TokenizerParts(
            backend=backend,
            special_tokens={"eos_token": "<|im_end|>"},
            bos_token_id=None,
            eos_token_ids=(258,),
            chat_templates={"default": _CHAT_TEMPLATE},
        )
    )
