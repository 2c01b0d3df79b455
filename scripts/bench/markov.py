"""What the Markov head adds to a drafting round: measured here at batch 16, computed for accelerators.

    python scripts/bench/markov.py

Measured: `propose` of one drafter (width 512, 5 layers, V 49 152, γ 7, rank 256) behind 256 tokens of context, without
the head, with it over the whole vocabulary, and with it over the 512 likeliest tokens, the default on CPUs.
Computed: a roofline of H200 rates over Qwen3 shapes; each part costs the longer of reading its weights once and its
arithmetic, the head's γ draws one after another, its bias fused into the softmax that reads the logits anyway.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deepspec.models.block_drafter import BlockDrafter
from deepspec.models.sampling import Sampling
from scripts.bench.train_step import make_drafter

ROWS, CONTEXT, WIDTH, VOCAB, BLOCK, RANK = 16, 256, 512, 49152, 7, 256
BANDWIDTH, FLOPS = 4.0e12, 5.0e14  # what kernels reach of an H200's 4.8 TB/s and 990 TFLOP/s of dense bf16


@dataclass(frozen=True)
class Shape:
    """A target: parameters of its layers, of one draft layer, width, vocabulary."""

    name: str
    target: float
    layer: float
    width: int
    vocab: int = 151936


SHAPES = (Shape("Qwen3-4B", 3.6e9, 1.01e8, 2560), Shape("Qwen3-8B", 6.95e9, 1.93e8, 4096))


def make(rank: int) -> BlockDrafter:
    """The drafter of the training bench; rank 0 leaves the head out."""
    options = argparse.Namespace(vocab=[VOCAB], hidden=WIDTH, layers=5, rank=rank, block=BLOCK)
    return make_drafter(options).eval()


def measure(repeats: int) -> dict[str, float]:
    """Median milliseconds of a proposal, the three ways in turn."""
    drafters = {"no head": make(0), "every token": make(RANK), "shortlist of 512": make(RANK)}
    drafters["shortlist of 512"].shortlist = 512
    anchors, uniforms = torch.arange(ROWS), torch.rand(ROWS, BLOCK)
    states = {}
    for name, drafter in drafters.items():
        states[name] = drafter.start(ROWS, CONTEXT + BLOCK)
        states[name].add(ROWS)
        taps = torch.randn(ROWS, CONTEXT, 5 * WIDTH)
        drafter.extend(states[name], torch.zeros(ROWS, CONTEXT + 1, dtype=torch.long), taps, [CONTEXT] * ROWS)
    samples: dict[str, list[float]] = {name: [] for name in drafters}
    for turn in range(repeats + 1):
        for name, drafter in drafters.items():
            began = time.perf_counter()
            drafter.propose(states[name], anchors, Sampling(), uniforms, BLOCK)
            if turn:
                samples[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in samples.items()}


def part(weights: float, rows: int) -> float:
    """Seconds of one pass of ``rows`` tokens through bf16 weights."""
    return max(2 * weights / BANDWIDTH, 2 * weights * rows / FLOPS)


def computed(shape: Shape, rows: int) -> tuple[float, float]:
    """Share of the head's γ draws in the time of drafting alone, and of drafting with its verification."""
    head = BLOCK * part(shape.vocab * RANK, rows)
    drafting = part(5 * shape.layer, rows * BLOCK) + part(shape.vocab * shape.width, rows * BLOCK)
    verifying = part(shape.target + shape.vocab * shape.width, rows * (BLOCK + 1))
    return head / drafting, head / (drafting + verifying)


def main() -> None:
    """Measure and compute."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    found = measure(options.repeats)
    for name, milliseconds in found.items():
        print(f"{name:<17} {milliseconds:7.1f} ms a proposal   {milliseconds / found['no head'] - 1:+7.1%}")
    for shape in SHAPES:
        for rows in (1, 16, 128):
            alone, whole = computed(shape, rows)
            print(f"{shape.name}, batch {rows:>3}: +{alone:.1%} of drafting, +{whole:.1%} of a round with verification")


if __name__ == "__main__":
    main()
