"""The proof of losslessness: scores against the model's own logits, endings by hand, wrong answers that must fail."""

from dataclasses import replace

import pytest
import torch

from deepspec.eval import exactness, scoring, verdict
from deepspec.eval.exactness import Control, Rules, ending_fault
from deepspec.eval.records import Record
from deepspec.eval.scoring import PARTS, WHOLE, Shape, Text
from deepspec.models import drafter as drafters
from deepspec.models.baselines import PromptLookup
from deepspec.models.decode import generate
from deepspec.models.drafter_config import DrafterConfig
from deepspec.models.frozen_head import FrozenHead
from tests.tiny import VOCAB, tiny_target

TOKENS = 48
NO_STOPS = Rules((), TOKENS)
DTYPES = [torch.float32, torch.bfloat16]


def prompts(count=12):
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(3, 24, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def decode(target, **options):
    """Records of greedy answers; a record's turn is its prompt's number."""
    done = generate(target, prompts(), max_new_tokens=TOKENS, stop_ids=(), **options)
    return sorted((record(item.tokens, item.index) for item in done), key=lambda item: item.turn)


def record(tokens, turn=0, finish="length"):
    return Record("d", f"p{turn}", turn, "", 0, list(tokens), finish, [], None, 1.0, 0.0, 0.0, 0.0, 1.0)


def control_of(target, plain, rules=NO_STOPS, **options):
    return Control(target, plain, lambda item: prompts()[item.turn], rules, **options)


@pytest.fixture(scope="module", params=DTYPES, ids=["float32", "bfloat16"])
def place(request):
    """(target, plain records, their control)"""
    target = tiny_target("qwen3", dtype=request.param)
    plain = decode(target)
    return target, plain, control_of(target, plain)


@pytest.fixture(scope="module")
def half():
    target = tiny_target("qwen3", dtype=torch.bfloat16)
    plain = decode(target)
    return target, plain, control_of(target, plain)


def logits_of(target, tokens):
    """[T, V] of the transformers model itself."""
    return target.model(torch.tensor([list(tokens)])).logits[0].float()


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("shape", [WHOLE, PARTS, Shape(step=3, halves=True, rows=2)])
def test_scores_are_the_models_own(family, shape):
    target = tiny_target(family)
    texts = [Text(tuple(ids), tuple(ids[::-1] + ids)[: 3 + 5 * i]) for i, ids in enumerate(prompts(5))]
    stop_ids = (7, 11)
    for text, line in zip(texts, scoring.score(target, texts, stop_ids, shape), strict=True):
        logits_TV = logits_of(target, text.prompt + text.answer)[len(text.prompt) - 1 :]
        at_answer_AV = logits_TV[:-1]
        token_A = torch.tensor(text.answer)[:, None]
        expected = at_answer_AV.max(-1).values - at_answer_AV.gather(1, token_A)[:, 0]
        torch.testing.assert_close(line.gap_A, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(line.pair_A2[:, 0], at_answer_AV.argmax(-1))
        ordered = at_answer_AV.sort(-1, descending=True).values
        torch.testing.assert_close(line.lead_A, ordered[:, 0] - ordered[:, 1], rtol=1e-4, atol=1e-4)
        end = float(logits_TV[-1].max() - logits_TV[-1, list(stop_ids)].max())
        assert line.stop_gap == pytest.approx(end, abs=1e-4)


def test_logits_in_small_parts_are_the_same(monkeypatch):
    target = tiny_target("qwen3")
    texts = [Text((3, 5), tuple(range(10, 30)))]
    (whole,) = scoring.score(target, texts, (7,))
    monkeypatch.setattr(scoring, "_LOGITS_AT_ONCE", 3 * VOCAB)
    (parts,) = scoring.score(target, texts, (7,))
    torch.testing.assert_close(parts.gap_A, whole.gap_A, rtol=1e-4, atol=1e-5)
    assert parts.stop_gap == pytest.approx(whole.stop_gap, abs=1e-5)
    assert len(parts.gap_A) == 20


def test_first_difference():
    assert exactness.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert exactness.first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert exactness.first_difference([1, 2, 3], [1, 2]) == 2
    assert exactness.first_difference([], [1]) == 0


@pytest.mark.parametrize(
    ("tokens", "finish", "shown", "stop_gap", "expected"),
    [
        ([4, 5, 9], "stop", True, 9.0, None),
        ([4, 5, 6, 7], "length", True, 9.0, None),
        ([4, 5, 6, 9], "stop", True, 9.0, None),
        ([4, 5], "length", True, 0.0, (2, "ends without a stop token")),
        ([4, 5], "stop", True, 0.0, (2, "said to end at a stop token")),
        ([4, 9, 5], "length", True, 9.0, (2, "goes on after its stop token")),
        ([9, 9], "stop", True, 9.0, (1, "goes on after its stop token")),
        ([4, 5, 6, 7, 8], "length", True, 9.0, (4, "longer than the limit")),
        ([4, 5, 9], "length", True, 9.0, (2, "said to be cut")),
        # an engine that leaves the stop token out: it must be the maximum at the answer's end
        ([4, 5], "", False, 0.0, None),
        ([4, 5], "", False, 0.4, None),
        ([4, 5], "", False, 0.6, (2, "ends without a stop token")),
    ],
)
def test_endings(tokens, finish, shown, stop_gap, expected):
    fault = ending_fault(record(tokens, finish=finish), Rules((9, 10), 4, shown), stop_gap, tolerance=0.5)
    if expected is None:
        assert fault is None
    else:
        assert fault[0] == expected[0]
        assert expected[1] in fault[1]


def test_the_tolerance_is_of_the_arithmetic(place):
    target, plain, control = place
    low, high = (1e-7, 1e-3) if target.dtype == torch.float32 else (1e-2, 1.0)
    assert low < control.tolerance < high
    # The distance of the two largest logits, one token at a time instead of all at once.
    changes = []
    for item in plain[:4]:
        ids = prompts()[item.turn]
        whole = logits_of(target, [*ids, *item.tokens])[len(ids) - 1 :]
        for at in range(0, TOKENS, 5):
            alone = logits_of(target, [*ids, *item.tokens[:at]])[-1]
            top = whole[at].topk(2)
            changes.append(abs(float(top.values[0] - top.values[1] - (alone[top.indices[0]] - alone[top.indices[1]]))))
    assert max(changes) <= control.tolerance
    assert control.tolerance <= 100 * max(changes)


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("name", ["ngram", "dspark"])
def test_a_right_drafter_passes(place, name, batch_size):
    target, _, control = place
    drafter = PromptLookup(VOCAB)
    if name == "dspark":
        config = DrafterConfig(kind="dspark", layers=1, block_size=4, markov_rank=6)
        drafter = drafters.build(config, target.config, FrozenHead.of(target), target.taps, seed=3)
        drafter = drafter.to(target.dtype)
    check = control.check(decode(target, drafter=drafter, batch_size=batch_size))
    assert check["verdict"].startswith(("identical", "consistent")), check
    assert (check["prompts"], check["positions"]) == (12, 12 * TOKENS)
    assert check["identical"] + check["ties"] == 12


def test_garbage_after_the_first_tie_fails(place):
    """The second best token at the first position whose two largest logits are within one, then token 0 for ever."""
    target, plain, control = place
    wrong = []
    for item in plain:
        ids = prompts()[item.turn]
        top = logits_of(target, [*ids, *item.tokens])[len(ids) - 1 : -1].topk(2)
        at = int(((top.values[:, 0] - top.values[:, 1]) <= 1.0).nonzero()[0, 0])
        second = int(top.indices[at, 1])
        wrong.append(replace(item, tokens=[*item.tokens[:at], second, *[0] * (TOKENS - at - 1)]))
    check = control.check(wrong)
    assert check["verdict"] == "NOT lossless"
    assert check["different"] == 12
    assert check["beyond"] > 200


def test_a_wrong_token_is_named_with_its_gap(place):
    target, plain, control = place
    ids, tokens = prompts()[2], plain[2].tokens
    logits_V = logits_of(target, [*ids, *tokens[:20]])[-1]
    best, worst = int(logits_V.argmax()), int(logits_V.argmin())
    check = control.check([*plain[:2], replace(plain[2], tokens=[*tokens[:20], worst, *tokens[21:]])])
    assert (check["prompts"], check["identical"], check["ties"], check["different"]) == (3, 2, 0, 1)
    shown, offence = check["first_difference"], check["offence"]
    assert (shown["position"], shown["plain"], shown["drafter"], shown["tie"]) == (20, tokens[20], worst, False)
    assert (offence["prompt"], offence["position"], offence["token"]) == ("p2", 20, worst)
    gap = float(logits_V[best] - logits_V[worst])
    assert offence["gap"] == pytest.approx(gap, rel=0.05)
    assert f"p2, token 20: {worst} is " in offence["text"]
    assert f"logits below the maximum {offence['best']} (tolerance " in offence["text"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tokens: tokens[:-1], "ends without a stop token and before the limit"),
        (lambda tokens: [*tokens, 5], "longer than the limit"),
    ],
)
def test_truncated_and_overlong_answers_fail(place, change, words):
    _, plain, control = place
    check = control.check([*plain[1:], replace(plain[0], tokens=change(plain[0].tokens))])
    assert check["verdict"] == "NOT lossless"
    assert (check["broken"], check["different"]) == (1, 1)
    assert words in check["offence"]["text"]


def test_prompts_without_a_plain_answer_are_left_out(place):
    target, plain, _ = place
    control = control_of(target, plain[:1])
    check = control.check(plain[:2])
    assert (check["prompts"], check["identical"], check["verdict"]) == (1, 1, "identical")


def test_nothing_is_proven_without_plain_answers(place):
    target, plain, _ = place
    check = control_of(target, []).check(plain)
    assert (check["verdict"], check["prompts"], check["tolerance"]) == ("not proven", 0, None)


def test_too_few_positions_prove_nothing_but_bits_do():
    """A dozen tokens cannot say how far this arithmetic rounds."""
    target = tiny_target("qwen3")
    rules = Rules((), 12)
    plain = [replace(decode(target)[0], tokens=decode(target)[0].tokens[:12])]
    control = control_of(target, plain, rules)
    assert control.tolerance is None
    assert control.check(plain)["verdict"] == "identical"
    changed = [replace(plain[0], tokens=[(plain[0].tokens[0] + 1) % VOCAB, *plain[0].tokens[1:]])]
    assert control.check(changed)["verdict"] == "not proven"
    assert control.check([replace(plain[0], tokens=plain[0].tokens[:5])])["verdict"] == "NOT lossless"


def test_plain_answers_that_are_not_greedy_are_no_control(half):
    """The same wrong token in both runs: nothing can be said, and a tolerance is not made of it."""
    target, plain, control = half
    worst = int(logits_of(target, [*prompts()[0], *plain[0].tokens[:9]])[-1].argmin())
    broken = [replace(plain[0], tokens=[*plain[0].tokens[:9], worst, *plain[0].tokens[10:]]), *plain[1:]]
    other = control_of(target, broken)
    assert other.tolerance == pytest.approx(control.tolerance, rel=1.0)
    again = [replace(broken[0], tokens=[*broken[0].tokens[:-1], 0]), *plain[1:]]
    check = other.check(again)
    assert check["null"]["beyond"] > 0
    assert check["verdict"] == "not proven"


def test_another_programs_rounding_is_measured_on_its_plain_answers(half):
    """An engine whose logits carry noise of its own: its answers are consistent, and garbage still fails."""
    target, plain, _ = half
    noisy = []
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        right = target.logits

        def rough(last, right=right, generator=generator):
            logits = right(last)
            return logits + 0.05 * torch.randn(logits.shape, generator=generator)

        target.logits = rough
        noisy.append(decode(target))
        del target.logits
    assert control_of(target, noisy[0]).check(noisy[1])["verdict"] in ("NOT lossless", "not proven")
    control = control_of(target, noisy[0], foreign=True)
    assert control.check(noisy[1])["verdict"].startswith("consistent")
    garbage = [replace(item, tokens=[*item.tokens[:5], *[0] * (TOKENS - 5)]) for item in plain]
    assert control.check(garbage)["verdict"] == "NOT lossless"


def test_garbage_in_an_engines_plain_answers_proves_nothing(half):
    target, plain, _ = half
    garbage = [replace(item, tokens=[*item.tokens[:5], *[0] * (TOKENS - 5)]) for item in plain]
    control = control_of(target, garbage, foreign=True)
    other = [replace(item, tokens=[*item.tokens[:9], *[0] * (TOKENS - 9)]) for item in plain]
    assert control.check(other)["verdict"] == "not proven"


def test_equal_answers_are_not_scored_again(half, monkeypatch):
    _, plain, control = half
    seen = []
    right = exactness.score
    monkeypatch.setattr(exactness, "score", lambda t, texts, *more: seen.append(len(texts)) or right(t, texts, *more))
    changed = replace(plain[0], tokens=[*plain[0].tokens[:-1], 0])
    assert verdict.failed(control.check([changed, *plain[1:]]))
    assert seen == [1]
