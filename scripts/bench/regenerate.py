"""Tokens/s of the in-process engine, and of a server if given, against ``generate`` called prompt by prompt.

usage: python scripts/bench/regenerate.py target=smollm2-135m [--prompts 32] [--tokens 64] [--server http://host:port/v1]
"""

import argparse
import time
from collections import deque

import torch

from deepspec import recipes
from deepspec.data.chat import render_prompt
from deepspec.data.config import DataPipelineConfig
from deepspec.data.demo_prompts import generate
from deepspec.data.engines import Request, TransformersEngine
from deepspec.data.regenerate import RegenerateConfig, Stamp
from deepspec.data.servers import ServersEngine
from deepspec.models.sampling import Sampling
from deepspec.models.target import Target


def measure(name: str, answer) -> float:
    """Print and return tokens/s of a callable that returns the number of tokens it made."""
    started = time.perf_counter()
    tokens = answer()
    rate = tokens / (time.perf_counter() - started)
    print(f"{name:<44}{tokens:>7} tokens {rate:>8.1f} tokens/s", flush=True)
    return rate


def main() -> None:
    """Measure each path on the same prompts, greedily."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--server")
    options, overrides = parser.parse_known_args()
    config = recipes.load("data", ["data=demo", *overrides], DataPipelineConfig)
    rows = [row for row in generate() if row["split"] == "train"][: options.prompts]
    requests = [Request(str(n), 0, [{"role": "user", "content": row["prompt"]}]) for n, row in enumerate(rows)]
    target = Target.load(config.target)

    def one_by_one() -> int:
        made = 0
        for request in requests:
            prompt = torch.tensor([render_prompt(target.tokenizer, request.messages, False)]).to(target.device)
            out = target.model.generate(prompt, max_new_tokens=options.tokens, do_sample=False)
            made += out.shape[1] - prompt.shape[1]
        return made

    def engine() -> int:
        batched = TransformersEngine(
            target, sampling=Sampling(), max_new_tokens=options.tokens, batch_size=config.regenerate.batch_size, seed=0,
            thinking=False,
        )  # fmt: skip
        return sum(len(answer.tokens or ()) for answer in batched.run(deque(requests)))

    slow = measure("transformers generate, prompt by prompt", one_by_one)
    fast = measure(f"engine, batch {config.regenerate.batch_size}", engine)
    print(f"engine / prompt by prompt: {fast / slow:.2f}")
    if options.server:
        counted: list[int] = []

        def served() -> int:
            given = RegenerateConfig(engine="openai", servers=[options.server], max_new_tokens=options.tokens)
            asked = ServersEngine(given, Stamp(config.target.name, False, options.tokens, 0, vars(Sampling())))
            asked.on_tokens = counted.append
            for answer in asked.run(deque(requests)):
                if answer.error:
                    print(answer.error)
            return sum(counted)

        print(f"server / prompt by prompt: {measure(f'server {options.server}', served) / slow:.2f}")


if __name__ == "__main__":
    main()
