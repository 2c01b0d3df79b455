"""Is decoding with a drafter lossless, and would it show if it were not? On a real target.

    python scripts/check_lossless.py [--drafter FOLDER] [--target smollm2-135m] [--samples 400] [--top-k 4]

Sampling: answers of three tokens to one prompt are counted and compared with the exact joint distribution of the target
at temperature 1 under top-k, from one forward over every pair of first tokens (chi-square). Greedy: the evaluator's
verdict on answers to a few prompts, in float32 and bfloat16. Honest decoding must pass both; adversaries, which are
wrong answers and decoders with a planted bug, must be caught. Exit status 1 otherwise. Without --drafter the newest
under runs/ is taken, and prompt lookup where there is none. The exhaustive proof of sampling is on tiny models
(tests/models/test_verify.py).
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deepspec.data.chat import render_prompt
from deepspec.eval import choose, verdict
from deepspec.eval.exactness import Control, Rules
from deepspec.eval.records import Record
from deepspec.models import decode
from deepspec.models import drafter as drafters
from deepspec.models.baselines import CausalDrafter, PromptLookup
from deepspec.models.decode import Proposal, generate
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.kv_cache import KVCache
from deepspec.models.sampling import Distribution, Sampling
from deepspec.models.target import Target
from deepspec.models.verify import verify

SAMPLING_PROMPT = "Once upon a time"
# The first two have short answers: a row that ends while others go on is what a stale cache row needs.
PROMPTS = (
    "What is the capital of France? Answer with one word.",
    "Is ice cold? Answer yes or no.",
    "Tell me a short story about a lighthouse keeper.",
    "Write a Python function that reverses a list.",
    "List the numbers from 1 to 20, separated by commas.",
    "Repeat this sentence three times: The cat sat on the mat.",
    "Why is the sky blue?",
    "Describe a bicycle to someone who has never seen one.",
    "Write a short letter to a neighbour about a noisy dog.",
    "Explain how bread is made.",
)
LEAST_EXPECTED = 5.0  # rarer answers are counted together
REJECT = 1e-3
Answers = dict[tuple[int, ...], float]


@dataclass(frozen=True)
class Outcome:
    """One line of the output: what ran, whether it is honest, whether it looked lossless, and why."""

    name: str
    honest: bool
    passed: bool
    text: str

    @property
    def right(self) -> bool:
        """Honest runs must pass, adversaries must not."""
        return self.honest == self.passed

    def __str__(self) -> str:
        mark = "ok    " if self.right else "WRONG "
        return f"{mark} {self.name:<44} {self.text}"


# Sampling


@torch.no_grad()
def exact(target: Target, prompt: list[int], k: int) -> Answers:
    """Probability of every answer of three tokens, in float64 from the target's logits."""

    def top(last_D: Tensor) -> list[tuple[int, float]]:
        values, ids = target.logits(last_D).double().topk(k)
        return list(zip(ids.tolist(), values.softmax(-1).tolist(), strict=True))

    def last_states(rows: list[list[int]]) -> Tensor:
        return target(torch.tensor(rows, device=target.device), taps=False).last_BTD[:, -1]

    firsts = top(last_states([prompt])[0])
    after_first = last_states([[*prompt, t] for t, _ in firsts])
    pairs = [(t, u, p * q) for (t, p), last_D in zip(firsts, after_first, strict=True) for u, q in top(last_D)]
    after_pair = last_states([[*prompt, t, u] for t, u, _ in pairs])
    return {(t, u, v): p * q for (t, u, p), last_D in zip(pairs, after_pair, strict=True) for v, q in top(last_D)}


def p_value(expected: Answers, answers: list[tuple[int, ...]]) -> tuple[float, int, float]:
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


class FlatDrafter(CausalDrafter):
    """The target as its own drafter at temperature 2: some of its drafts are accepted and some are not."""

    def propose(
        self, state: Any, anchor_B: Tensor, sampling: Sampling, uniforms_BG: Tensor, length: int, greedy: bool = False
    ) -> Proposal:
        """As the target, with a flatter distribution."""
        return super().propose(state, anchor_B, replace(sampling, temperature=2.0), uniforms_BG, length, greedy)


def one_uniform_reused() -> AbstractContextManager[Any]:
    """A planted bug: drafting, acceptance and the target's own draw of a round share one random number."""
    right = decode._Loop._uniforms

    def reused(loop: Any, rows: Any) -> Tensor:
        uniforms = right(loop, rows)
        return uniforms[:, :1].expand_as(uniforms)

    return patch.object(decode._Loop, "_uniforms", reused)


def sampled(
    target: Target,
    drafter: Any,
    prompt: list[int],
    expected: Answers,
    options: argparse.Namespace,
    greedy: bool = False,
) -> tuple[float, str]:
    """(p, words) of the chi-square test on ``options.samples`` answers of three tokens."""
    completions = list(
        generate(
            target,
            [prompt] * options.samples,
            drafter=drafter,
            sampling=Sampling(1.0, top_k=options.top_k),
            max_new_tokens=3,
            batch_size=options.batch_size,
            stop_ids=(),
            greedy_draft=greedy,
        )
    )
    chi, freedom, p = p_value(expected, [tuple(completion.tokens) for completion in completions])
    rounds = [each for completion in completions for each in completion.rounds]
    drafted, accepted = sum(each.proposed for each in rounds), sum(each.accepted for each in rounds)
    test = f"chi-square {chi:.1f}, {freedom} degrees of freedom, p = {p:.3g}"
    return p, f"{test}; {accepted} of {drafted} drafts accepted"


def sampling_outcomes(
    target: Target, drafter: Any, prompt: list[int], options: argparse.Namespace
) -> Iterator[Outcome]:
    """Plain, with the drafter, with drafts from a flatter target, and with one uniform reused."""
    expected = exact(target, prompt, options.top_k)
    flat = FlatDrafter(target, target.vocab_size, block_size=2)
    runs: list[tuple[str, Any, bool]] = [("plain", None, False)]
    if not isinstance(drafter, PromptLookup):  # which finds nothing to propose in three tokens
        runs += [("the drafter", drafter, False), ("the drafter's greedy drafts", drafter, True)]
    runs.append(("drafts from a flatter target", flat, False))
    for name, tool, greedy in runs:
        p, text = sampled(target, tool, prompt, expected, options, greedy)
        yield Outcome(f"sampling, {name}", True, p >= REJECT, text)
    with one_uniform_reused():
        p, text = sampled(target, flat, prompt, expected, options)
    yield Outcome("sampling, one uniform reused", False, p >= REJECT, text)


# Greedy decoding


def one_accepted_too_many() -> AbstractContextManager[Any]:
    """A planted bug: the first refused draft token is kept, and the target goes on after it."""

    def generous(
        p: Distribution, draft_Bk: Tensor, q: Distribution, lengths_B: Tensor, uniforms_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        accepted_B, _ = verify(p, draft_Bk, q, lengths_B, uniforms_B)
        more_B = torch.minimum(accepted_B + 1, lengths_B)
        rows_B = torch.arange(len(more_B), device=more_B.device)
        return more_B, p[rows_B, more_B].argmax()

    return patch.object(decode, "verify", generous)


def stale_cache_row() -> AbstractContextManager[Any]:
    """A planted bug: when a row leaves, the last one takes its place without its keys and values."""

    def careless(cache: KVCache, row: int) -> int:
        last = cache.rows - 1
        cache._host[row] = cache._host[last]
        cache._device[row] = cache._device[last]
        cache.rows = last
        return last

    return patch.object(KVCache, "remove", careless)


def second_best(target: Target, tolerance: float) -> AbstractContextManager[Any]:
    """A planted bug: wherever the two largest logits are within ``tolerance``, the second is chosen."""
    right = target.logits

    def swapped(last: Tensor) -> Tensor:
        logits = right(last)
        top = logits.topk(2, dim=-1)
        near = (top.values[..., :1] - top.values[..., 1:]) <= tolerance
        second = top.indices[..., 1:]
        raised = torch.where(near, top.values[..., :1] + 1, top.values[..., 1:])
        return logits.scatter(-1, second, raised)

    return patch.object(target, "logits", swapped)


def garbage_after_the_first_tie(control: Control, record: Record) -> Record:
    """The second best token at the first near-tie, then token 0 up to the limit.

    Only of answers that the limit cut: the others would be caught by their missing stop token already.
    """
    scores, tolerance = control.scores[record.key], control.tolerance
    assert tolerance is not None
    near = (scores.lead_A <= tolerance).nonzero()
    if not len(near) or record.finish != "length":
        return record
    at = int(near[0, 0])
    second = int(scores.pair_A2[at, 1])
    garbage = [0] * (len(record.tokens) - at - 1)
    return replace(record, tokens=[*record.tokens[:at], second, *garbage])


def truncated(control: Control, record: Record) -> Record:
    """An answer without its last third."""
    return replace(record, tokens=record.tokens[: max(1, len(record.tokens) * 2 // 3)])


def goes_on_after_its_stop(control: Control, record: Record) -> Record:
    """One token more than an answer that had ended."""
    return replace(record, tokens=[*record.tokens, 0]) if record.finish == "stop" else record


TAMPERED: dict[str, Callable[[Control, Record], Record]] = {
    "garbage after the first tie": garbage_after_the_first_tie,
    "truncated answers": truncated,
    "a token after the stop token": goes_on_after_its_stop,
}


class Greedy:
    """Greedy answers of one target and drafter, and the control they are held against."""

    def __init__(
        self,
        target: Target,
        drafter: Any,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_ids: Sequence[int] | None = None,
        batch_size: int = 4,
    ) -> None:
        self.target, self.drafter, self.prompts = target, drafter, prompts
        self.stop_ids = tuple(target.stop_ids if stop_ids is None else stop_ids)
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self.plain = self.answers(None)
        rules = Rules(self.stop_ids, max_new_tokens)
        self.control = Control(target, self.plain, lambda record: prompts[record.turn], rules)

    def answers(self, drafter: Any) -> list[Record]:
        """Records of every prompt, in order; a record's turn is the prompt's number."""
        completions = generate(
            self.target,
            self.prompts,
            drafter=drafter,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
            stop_ids=self.stop_ids,
        )
        seconds = dict.fromkeys(("wall", "prefill", "draft", "verify", "other"), 0.0)
        records = [
            Record(
                dataset="own",
                prompt="prompt",
                turn=done.index,
                prompt_digest="",
                prompt_tokens=len(self.prompts[done.index]),
                tokens=done.tokens,
                finish=done.finish_reason,
                rounds=[],
                confidence=None,
                **seconds,
            )
            for done in completions
        ]
        return sorted(records, key=lambda record: record.turn)

    def outcome(self, name: str, honest: bool, records: Sequence[Record]) -> Outcome:
        """The evaluator's verdict on answers."""
        check = self.control.check(records)
        _, why = verdict.judge(check)
        text = check["verdict"] if verdict.proven(check) else f"{check['verdict']}: {why}"
        return Outcome(name, honest, verdict.proven(check), text)

    def outcomes(self, planted: bool = True) -> Iterator[Outcome]:
        """The honest run, and every adversary; those that decode anew only if ``planted``."""
        dtype = str(self.target.dtype).removeprefix("torch.")
        yield self.outcome(f"{dtype}, the drafter", True, self.answers(self.drafter))
        for name, tamper in TAMPERED.items():
            wrong = [tamper(self.control, record) for record in self.plain]
            if wrong != self.plain:  # in float32 there may be no near-tie
                yield self.outcome(f"{dtype}, {name}", False, wrong)
        if not planted:
            return
        bugs: dict[str, AbstractContextManager[Any]] = {
            "an accepted token too many": one_accepted_too_many(),
            "a stale cache row": stale_cache_row(),
        }
        tolerance = self.control.tolerance
        near_ties = self.control.noise["near_ties"]
        if tolerance is not None and near_ties:
            # Half of it: rounding then carries no token beyond the tolerance, and only their number gives them away.
            bugs["second best at every near-tie"] = second_best(self.target, tolerance / 2)
        for name, bug in bugs.items():
            with bug:
                wrong = self.answers(self.drafter)
            yield self.outcome(f"{dtype}, {name}", False, wrong)


def load(options: argparse.Namespace, dtype: str) -> tuple[Target, Any]:
    """The target, and the drafter asked for, else the newest, else prompt lookup."""
    try:
        found = choose.candidates([options.drafter] if options.drafter else [])
    except choose.ChooseError:
        if options.drafter:
            raise
        found = []
    name = options.target or (None if found else "smollm2-135m")
    target = Target.load(choose.target_config(name, found, dtype, False))
    if not found:
        return target, PromptLookup(target.vocab_size)
    return target, drafters.load(found[0].folder, FrozenHead.of(target))


def main() -> int:
    """Honest runs and adversaries, sampled and greedy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", help="folder (default: the newest under runs/, else prompt lookup)")
    parser.add_argument("--target", help="recipe, folder or hub id (default: the drafter's own)")
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64, help="of the samples")
    parser.add_argument("--max-new-tokens", type=int, default=40, help="of the greedy answers")
    options = parser.parse_args()
    wrong = 0
    for dtype in ("float32", "bfloat16"):
        target, drafter = load(options, dtype)
        outcomes = Greedy(
            target,
            drafter,
            [render_prompt(target.tokenizer, [{"role": "user", "content": text}], False) for text in PROMPTS],
            options.max_new_tokens,
        ).outcomes(planted=dtype == "bfloat16")  # where near-ties make it harder
        if dtype == "float32":
            prompt = target.tokenizer.encode(SAMPLING_PROMPT, add_special_tokens=False)
            outcomes = itertools.chain(sampling_outcomes(target, drafter, prompt, options), outcomes)
        for outcome in outcomes:
            print(outcome, flush=True)
            wrong += not outcome.right
    print(f"{wrong} wrong" if wrong else "every adversary was caught, every honest run passed")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
