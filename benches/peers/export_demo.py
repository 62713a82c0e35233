"""Write the demo model as a Hugging Face folder in bfloat16, so that every engine reads the same weights.

usage: python benches/peers/export_demo.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from octavo.loading.resolve import resolve_model
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    source = Path(resolve_model("demo").path)
    names = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    AutoModelForCausalLM.from_pretrained(**names, dtype=torch.bfloat16).save_pretrained(sys.argv[1])
    AutoTokenizer.from_pretrained(**names).save_pretrained(sys.argv[1])


if __name__ == "__main__":
    main()
