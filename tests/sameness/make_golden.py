"""Write `golden.json`: transformers' greedy tokens for every prompt, on the demo model's own file in fp32.

    python tests/sameness/make_golden.py PATH_OF_THE_DEMO_GGUF

Each prompt alone, end tokens ignored. `margin` is the least difference between the two likeliest logits of an answer:
how near to a tie it ever came.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from prompts import CHATS, TEXTS

NUM_TOKENS = 64
GOLDEN = Path(__file__).with_name("golden.json")


def load(path: Path) -> tuple[Any, Any]:
    """transformers' model (fp32) and tokenizer of a GGUF file."""
    arguments = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**arguments, dtype=torch.float32)
    # What a call leaves open is filled in from here: without it, answers go on after an end token.
    model.generation_config.eos_token_id = None
    return model.eval(), transformers.AutoTokenizer.from_pretrained(**arguments)


def greedy(model: Any, prompt_ids: list[int], num_tokens: int) -> tuple[list[int], float]:
    """Greedy tokens, and the least margin between the two likeliest logits."""
    output = model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        generation_config=transformers.GenerationConfig(
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        ),
    )
    likeliest = torch.stack([logits[0].float().topk(2).values for logits in output.logits])
    return output.sequences[0, len(prompt_ids) :].tolist(), float((likeliest[:, 0] - likeliest[:, 1]).min())


def main() -> None:
    path = Path(sys.argv[1])
    model, tokenizer = load(path)
    texts = [(text, tokenizer(text)["input_ids"]) for text in TEXTS]
    for text in CHATS:
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        texts.append((chat, tokenizer(chat, add_special_tokens=False)["input_ids"]))
    answers = []
    for text, prompt_ids in texts:
        tokens, margin = greedy(model, prompt_ids, NUM_TOKENS)
        answers.append({"text": text, "prompt": prompt_ids, "tokens": tokens, "margin": round(margin, 6)})
        print(f"{len(answers)}/{len(texts)} margin {margin:.5f} {tokenizer.decode(tokens)[:60]!r}")
    header = {
        "command": "python tests/sameness/make_golden.py SmolLM2-135M-Instruct.Q4_1.gguf",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "dtype": "float32",
        "model_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    lines = ",\n".join(json.dumps(answer, ensure_ascii=False) for answer in answers)
    GOLDEN.write_text(json.dumps(header)[:-1] + ', "answers": [\n' + lines + "\n]}\n")


if __name__ == "__main__":
    main()
