"""Does sampling with a real drafter leave a real target's distribution as it is? A chi-square test.

    python scripts/check_lossless.py --drafter runs/smollm2-135m/drafters/dspark [--samples 800] [--top-k 4]

Answers of three tokens to one prompt are counted and compared with the exact joint distribution of the target at
temperature 1 under top-k, from one forward over every pair of first tokens. Exit status 1 when it is rejected. The
exhaustive proof is on tiny models (tests/models/test_verify.py); this one has a real vocabulary and a trained drafter.
"""

import argparse
import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deepspec.data.chat import render_prompt
from deepspec.eval import choose
from deepspec.models import drafter as drafters
from deepspec.models.decode import generate
from deepspec.models.sampling import Sampling
from deepspec.models.target import Target

PROMPT = "Tell me a short story about a lighthouse keeper."
LEAST_EXPECTED = 5.0  # rarer answers are counted together
REJECT = 1e-3


@torch.no_grad()
def exact(target: Target, prompt: list[int], k: int) -> dict[tuple[int, ...], float]:
    """Probability of every answer of three tokens, in float64 from the target's logits."""

    def top(last_D: torch.Tensor) -> list[tuple[int, float]]:
        values, ids = target.logits(last_D).double().topk(k)
        return list(zip(ids.tolist(), values.softmax(-1).tolist(), strict=True))

    def last_states(rows: list[list[int]]) -> torch.Tensor:
        return target(torch.tensor(rows, device=target.device), taps=False).last_BTD[:, -1]

    firsts = top(last_states([prompt])[0])
    after_first = last_states([[*prompt, t] for t, _ in firsts])
    pairs = [(t, u, p * q) for (t, p), last_D in zip(firsts, after_first, strict=True) for u, q in top(last_D)]
    after_pair = last_states([[*prompt, t, u] for t, u, _ in pairs])
    return {(t, u, v): p * q for (t, u, p), last_D in zip(pairs, after_pair, strict=True) for v, q in top(last_D)}


def p_value(expected: dict[tuple[int, ...], float], answers: list[tuple[int, ...]]) -> tuple[float, int, float]:
    """(chi-square, degrees of freedom, p) of the counts; 0 for an answer that the target cannot give."""
    count = len(answers)
    if any(answer not in expected for answer in answers):
        return float("inf"), 0, 0.0
    cells: dict[tuple[int, ...], list[float]] = {}
    for answer, share in expected.items():
        cell = cells.setdefault(answer if share * count >= LEAST_EXPECTED else (), [0.0, 0.0])
        cell[0] += share * count
    for answer in answers:
        cells[answer if expected[answer] * count >= LEAST_EXPECTED else ()][1] += 1
    chi = sum((seen - wanted) ** 2 / wanted for wanted, seen in cells.values())
    freedom = len(cells) - 1
    return chi, freedom, float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(chi / 2)))


def main() -> int:
    """Sample with the drafter and without, compare both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", help="folder (default: the newest under runs/)")
    parser.add_argument("--samples", type=int, default=800)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    candidate = choose.candidates([options.drafter] if options.drafter else [])[0]
    target = Target.load(choose.target_config(None, [candidate], "float32", False))
    drafter = drafters.load(candidate.folder, target)
    prompt = render_prompt(target.tokenizer, [{"role": "user", "content": PROMPT}], False)
    expected = exact(target, prompt, options.top_k)
    failed = False
    for label, tool, greedy in (("plain", None, False), ("drafted", drafter, False), ("greedy drafts", drafter, True)):
        completions = list(
            generate(
                target,
                [prompt] * options.samples,
                drafter=tool,
                sampling=Sampling(1.0, top_k=options.top_k),
                max_new_tokens=3,
                batch_size=options.batch_size,
                stop_ids=(),
                greedy_draft=greedy,
            )
        )
        chi, freedom, p = p_value(expected, [tuple(completion.tokens) for completion in completions])
        rounds = list(itertools.chain.from_iterable(completion.rounds for completion in completions))
        drafted, accepted = sum(r.proposed for r in rounds), sum(r.accepted for r in rounds)
        result = f"chi-square {chi:.1f}, {freedom} degrees of freedom, p = {p:.3f}"
        print(f"{label:<14} {result}; {accepted} of {drafted} drafts accepted", flush=True)
        failed |= p < REJECT
    print("the target's distribution: " + ("REJECTED" if failed else "not rejected"))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
