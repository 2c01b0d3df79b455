"""The loop against one-token-at-a-time decoding with transformers' own forward, at any batch size, with any drafter."""

import pytest
import torch

from deepspec.models import drafter as drafters
from deepspec.models import kv_cache
from deepspec.models.baselines import CausalDrafter, PromptLookup
from deepspec.models.decode import (
    DecodeError,
    PromptError,
    Proposal,
    Timings,
    generate,
    prompt_problem,
)
from deepspec.models.drafter_config import DrafterConfig
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.sampling import Distribution, Sampling
from deepspec.models.target import Target
from deepspec.models.verify import Static
from tests.models.drafting import shake
from tests.tiny import FAMILIES, VOCAB, tiny_config, tiny_target


def untied_target(family="qwen3", **overrides):
    """Tied random models repeat one token; untied ones do not, so that a slip in the context shows."""
    return tiny_target(family, tie_word_embeddings=False, **overrides)


PROMPTS = [[5, 9, 5, 9, 5], [7], [int(t) for t in torch.arange(20) * 7 % 90 + 3], [8, 8, 8], [11, 4]]


@pytest.fixture(autouse=True)
def slabs_that_must_grow(monkeypatch):
    """Rows outgrow the first slabs in every test, as they do behind real prompts."""
    monkeypatch.setattr(kv_cache, "_FIRST_POSITIONS", 4)


class _RowCounter:
    def __init__(self):
        self.lengths = []

    def add(self, count=1):
        self.lengths += [0] * count

    def remove(self, row):
        self.lengths[row] = self.lengths[-1]
        self.lengths.pop()


class RandomDrafter:
    """Proposes from a fixed random table by the previous token, and checks what the loop tells it. Confidence too is a
    function of the previous token alone."""

    def __init__(self, vocab=VOCAB, block_size=4, taps=None, width=None, lie=False, confident=True):
        generator = torch.Generator().manual_seed(3)
        self.table = torch.randn(vocab, vocab, generator=generator)
        self.confidence = torch.rand(vocab, generator=generator) if confident else None
        self.block_size, self.taps, self.width, self.lie = block_size, taps, width, lie
        self.proposed = 0

    def start(self, rows, max_length):
        return _RowCounter()

    def extend(self, state, tokens_BT1, taps_BTF, counts_B, rows=None):
        assert (taps_BTF is None) == (self.taps is None)
        if taps_BTF is not None:
            assert taps_BTF.shape[-1] == self.width
        lengths = state.lengths[rows] if rows is not None else state.lengths
        assert len(lengths) == len(counts_B) == len(tokens_BT1)
        assert bool((counts_B >= 1).all())
        assert bool((counts_B < tokens_BT1.shape[1]).all())
        new = [old + count for old, count in zip(lengths, counts_B.tolist(), strict=True)]
        state.lengths[rows if rows is not None else slice(None)] = new

    def propose(self, state, anchor_B, sampling, uniforms_BG, length, greedy=False):
        self.proposed += 1
        previous, tokens, qs, confidence = anchor_B, [], [], []
        for step in range(length):
            q = Distribution.of(self.table[previous], sampling)
            q = q.argmax_only() if greedy else q
            if self.confidence is not None:
                confidence.append(self.confidence[previous])
            previous = q.sample(uniforms_BG[:, step])
            tokens.append(previous)
            qs.append(Distribution.of(torch.zeros(len(anchor_B), len(self.table)), sampling) if self.lie else q)
        stacked = torch.stack(confidence, 1) if confidence else None
        return Proposal(torch.stack(tokens, 1), Distribution.stack(qs), stacked)


def naive_greedy(target, prompt, count):
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def run(target, prompts, **kwargs):
    kwargs = {"stop_ids": (), "max_new_tokens": 9, **kwargs}
    done = {completion.index: completion for completion in generate(target, prompts, **kwargs)}
    assert sorted(done) == sorted(kwargs.get("indices") or range(len(prompts)))
    return done


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_naive_decoding_for_every_drafter_and_batch_size(family):
    target = untied_target(family)
    want = [naive_greedy(target, prompt, 9) for prompt in PROMPTS]
    small = untied_target("llama", num_hidden_layers=2)
    drafters = [
        None,
        PromptLookup(VOCAB, 4),
        RandomDrafter(taps=target.taps, width=96),
        CausalDrafter(small, VOCAB, 3),
        CausalDrafter(target, VOCAB, 3),
    ]
    for drafter in drafters:
        for batch_size in (1, 3, 8):
            done = run(target, PROMPTS, drafter=drafter, batch_size=batch_size)
            assert [done[i].tokens for i in range(len(PROMPTS))] == want, (type(drafter), batch_size)
            assert all(completion.finish_reason == "length" for completion in done.values())
    rounds = [r for completion in done.values() for r in completion.rounds]
    assert sum(r.committed for r in rounds) == 8 * len(PROMPTS)  # the first token is the prefill's
    assert all(r.accepted == r.proposed for r in rounds)  # the last drafter is the target itself


def test_gemma4_with_shared_keys_and_per_layer_inputs():
    """Layers that reuse another layer's keys have no slab of their own."""
    target = untied_target("gemma4", hidden_size_per_layer_input=8, num_kv_shared_layers=2)
    assert [slab.shape[1] for slab in target.new_cache(1, 8).keys] == [2, 2, 0, 0]
    want = [naive_greedy(target, prompt, 6) for prompt in PROMPTS]
    done = run(target, PROMPTS, drafter=CausalDrafter(target, VOCAB, 3), batch_size=3, max_new_tokens=6)
    assert [done[i].tokens for i in range(len(PROMPTS))] == want


def test_text_of_a_multimodal_wrapper():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=tiny_config("gemma3", tie_word_embeddings=False).to_dict(),
        vision_config={"hidden_size": 16, "intermediate_size": 16, **vision},
        image_token_index=VOCAB - 1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = Target.from_model(Gemma3ForConditionalGeneration(config))
    want = [naive_greedy(target, prompt, 6) for prompt in PROMPTS]
    done = run(target, PROMPTS, drafter=CausalDrafter(target, VOCAB, 3), batch_size=3, max_new_tokens=6)
    assert [done[i].tokens for i in range(len(PROMPTS))] == want


def test_sampled_result_of_a_prompt_does_not_depend_on_its_batch():
    target = untied_target(dtype=torch.float64)
    sampling = Sampling(1.0, top_p=0.95)
    for drafter in (None, RandomDrafter(), CausalDrafter(untied_target("llama", dtype=torch.float64), VOCAB, 3)):
        alone = run(target, PROMPTS, drafter=drafter, sampling=sampling, seed=5)
        for batch_size in (2, 5):
            batched = run(target, PROMPTS, drafter=drafter, sampling=sampling, seed=5, batch_size=batch_size)
            assert {i: c.tokens for i, c in batched.items()} == {i: c.tokens for i, c in alone.items()}
        part = run(target, PROMPTS[3:], drafter=drafter, sampling=sampling, seed=5, indices=[3, 4])
        assert part[4].tokens == alone[4].tokens
        other = run(target, PROMPTS, drafter=drafter, sampling=sampling, seed=6)
        assert {i: c.tokens for i, c in other.items()} != {i: c.tokens for i, c in alone.items()}


SMALL_V = 5
TEMPERATURES = [0.7, 1.0]
SMALL_DRAFTERS = {
    "random": None,
    "dspark": dict(kind="dspark", layers=1, markov_rank=4),
    "dspark-rnn": dict(kind="dspark", layers=1, markov_rank=4, markov_head="rnn"),
    "dflash": dict(kind="dflash", layers=1),
    "reduced": dict(kind="dspark", layers=1, markov_rank=4, draft_vocab_size=3),
    "eagle3": dict(kind="eagle3", ttt_length=2),
}


def small_drafter(target, name):
    """A drafter of two tokens over SMALL_V, its weights far from the target's and from a fresh drafter's."""
    options = SMALL_DRAFTERS[name]
    if options is None:
        return RandomDrafter(SMALL_V, 2)
    cfg = DrafterConfig(block_size=2, **options)
    draft_ids = [0, 2, 3] if cfg.draft_vocab_size else None
    made = drafters.build(cfg, target.config, FrozenHead.of(target), target.taps, draft_ids=draft_ids)
    return shake(made.eval())


def chi_square_z(target, drafter, sampling, count=2500, **kwargs):
    """Standardised chi-square of four tokens given by the loop against the target's exact joint distribution.

    The first comes from the prefill, then two can be drafted. Texts expected fewer than five times are one cell.
    """
    assert (sampling.top_k, sampling.top_p, sampling.min_p) == (0, 1.0, 0.0)
    prompt, length = [1, 3, 2], 4
    counts = torch.zeros([SMALL_V] * length)
    for completion in generate(
        target,
        [prompt] * count,
        drafter=drafter,
        sampling=sampling,
        max_new_tokens=length,
        batch_size=1000,
        stop_ids=(),
        seed=1,
        **kwargs,
    ):
        counts[tuple(completion.tokens)] += 1
    texts = torch.cartesian_prod(*[torch.arange(SMALL_V)] * length)
    with torch.no_grad():
        ids = torch.cat([torch.tensor(prompt).expand(len(texts), -1), texts], 1)
        logits = target.model(input_ids=ids, use_cache=False).logits[:, len(prompt) - 1 : -1].double()
    p = (logits / sampling.temperature).softmax(-1).gather(-1, texts[..., None])[..., 0].prod(-1)
    expected, seen = p * count, counts.flatten().double()
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
    cells = len(expected) - 1
    assert cells > 20
    return float((((seen - expected) ** 2 / expected).sum() - cells) / (2 * cells) ** 0.5)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", SMALL_DRAFTERS)
def test_sampled_distribution_of_the_loop_is_the_targets(name, temperature):
    target = untied_target(vocab_size=SMALL_V)
    assert abs(chi_square_z(target, small_drafter(target, name), Sampling(temperature))) < 4


@pytest.mark.parametrize(
    "options",
    [
        {"greedy_draft": True},
        {"confidence_threshold": 0.4},
        {"schedule": Static(1)},
        {"block": 1},
    ],
    ids=["greedy_draft", "threshold", "schedule", "block_1"],
)
def test_no_option_changes_the_sampled_distribution(options):
    target = untied_target(vocab_size=SMALL_V)
    assert abs(chi_square_z(target, RandomDrafter(SMALL_V, 2), Sampling(0.7), **options)) < 4


def test_the_distribution_test_notices_a_drafter_that_lies_about_q():
    target = untied_target(vocab_size=SMALL_V)
    assert chi_square_z(target, RandomDrafter(SMALL_V, 2, lie=True), Sampling(1.0)) > 10


class Overheard:
    """A drafter that keeps its proposals, each with its sampling and the same block at temperature 1."""

    def __init__(self, inner):
        self.inner, self.heard = inner, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def propose(self, state, anchor_B, sampling, uniforms_BG, length, greedy=False):
        first = torch.zeros_like(uniforms_BG)  # the first token that is possible, at any temperature
        mine, warm = (
            self.inner.propose(state, anchor_B, each, first, length, greedy) for each in (sampling, Sampling(1.0))
        )
        self.heard.append((sampling, mine, warm))
        return mine


@pytest.mark.parametrize("name", SMALL_DRAFTERS)
def test_the_drafter_proposes_at_the_temperature_of_the_run(name):
    """Losslessness alone does not show it: a drafter that ignores the temperature is only accepted less often."""
    target = untied_target(vocab_size=SMALL_V)
    drafter = Overheard(small_drafter(target, name))
    run(target, [[1, 3, 2], [4, 0]], drafter=drafter, sampling=Sampling(0.7), batch_size=2)
    assert len(drafter.heard) > 2
    for sampling, proposal, warm in drafter.heard:
        assert sampling == Sampling(0.7)
        assert torch.equal(proposal.tokens_BG, warm.tokens_BG)
        torch.testing.assert_close(proposal.q.probs(), (warm.q.probs().log() / 0.7).softmax(-1))


def test_a_stop_token_inside_an_accepted_block_ends_the_row():
    target = untied_target()
    drafter = CausalDrafter(target, VOCAB, 6)  # every proposal is accepted
    full = naive_greedy(target, PROMPTS[0], 9)
    at = next(i for i in range(2, 6) if full[i] not in full[:i])  # inside the first block
    done = run(target, PROMPTS, drafter=drafter, stop_ids=[full[at]], batch_size=2)
    assert done[0].tokens == full[: at + 1]
    assert done[0].finish_reason == "stop"
    last = done[0].rounds[-1]
    assert last.accepted == last.proposed == 6
    assert last.committed == at
    for i, completion in done.items():
        want = naive_greedy(target, PROMPTS[i], 9)
        cut = want.index(full[at]) + 1 if full[at] in want else 9
        assert completion.tokens == want[:cut]


def test_stop_on_the_first_token_needs_no_round():
    target = untied_target()
    first = naive_greedy(target, PROMPTS[0], 1)
    done = run(target, PROMPTS[:1], stop_ids=first)
    assert (done[0].tokens, done[0].finish_reason, done[0].rounds) == (first, "stop", [])


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 8])
def test_max_new_tokens_is_exact_and_the_last_block_is_whole(max_new_tokens):
    """As the public evaluator does: the limit cuts what is kept, never what is verified, so it does not lower τ."""
    target = untied_target()
    drafter = CausalDrafter(target, VOCAB, 4)
    done = run(target, PROMPTS, drafter=drafter, max_new_tokens=max_new_tokens, batch_size=3)
    for completion in done.values():
        assert len(completion.tokens) == max_new_tokens
        assert {r.proposed for r in completion.rounds} <= {4}
        assert all(r.committed == r.accepted + 1 for r in completion.rounds)
        left = max_new_tokens - 1
        for r in completion.rounds:
            assert left > 0, "no round begins when the answer is complete"
            left -= r.committed
        assert left <= 0


def test_a_block_is_shorter_where_the_target_has_no_more_positions():
    target = untied_target()
    limit = target.config.max_position_embeddings
    prompt = [1 + n % (VOCAB - 2) for n in range(limit - 6)]
    done = run(target, [prompt], drafter=CausalDrafter(target, VOCAB, 4), max_new_tokens=6)
    position = len(prompt) + 1
    for r in done[0].rounds:
        assert r.proposed == min(4, limit - position)
        position += r.committed
    assert len(done[0].tokens) == 6


def test_confidence_is_recorded_for_the_whole_block_and_the_threshold_is_respected():
    """The paper's rule: the first confidence below the threshold ends the prefix."""
    target = untied_target()
    drafter = RandomDrafter()
    done = run(target, PROMPTS, drafter=drafter, confidence_threshold=0.3, batch_size=2, max_new_tokens=30)
    offered = set()
    for completion in done.values():
        for r in completion.rounds:
            assert len(r.confidence) == 4
            low = [k for k, c in enumerate(r.confidence) if c < 0.3]
            assert r.proposed == (low[0] if low else 4)
            assert r.accepted <= r.proposed
            offered.add(r.proposed)
    assert {0, 1} < offered


def test_a_schedule_sees_zero_where_the_target_has_no_positions():
    target, seen = untied_target(), []
    limit = target.config.max_position_embeddings
    prompt = [1 + n % (VOCAB - 2) for n in range(limit - 3)]

    def schedule(confidence_BG):
        seen.append(confidence_BG.clone())
        return [4] * len(confidence_BG)

    run(target, [prompt], drafter=RandomDrafter(), schedule=schedule, max_new_tokens=3)
    assert (seen[0] > 0).sum(-1).tolist() == [2], "prompt and first token leave two positions"


def test_options_that_contradict_each_other():
    target, lookup = untied_target(), PromptLookup(VOCAB, 4)
    cases = [
        ({"block": 3}, "need a drafter"),
        ({"confidence_threshold": 0.5}, "need a drafter"),
        ({"drafter": lookup, "block": 5}, "outside 1…4"),
        ({"drafter": lookup, "confidence_threshold": 0.5, "schedule": Static(1)}, "not both"),
        ({"batch_size": 0}, "positive"),
        ({"max_new_tokens": 0}, "positive"),
        ({"indices": [1]}, "indices"),
    ]
    for options, match in cases:
        with pytest.raises(DecodeError, match=match):
            generate(target, PROMPTS, **{"max_new_tokens": 4, **options})
    with pytest.raises(DecodeError, match="confidence head"):
        run(target, PROMPTS, drafter=lookup, confidence_threshold=0.5)


def test_prompts_that_cannot_be_decoded_are_refused_before_any_work():
    target = untied_target()
    cases = [([], "no tokens"), ([3] * 510, "exceed the 512 positions"), ([3, VOCAB], "another tokenizer")]
    for prompt, match in cases:
        with pytest.raises(PromptError, match=f"prompt 1 cannot be decoded: .*{match}"):
            generate(target, [[3], prompt], max_new_tokens=4)
        assert prompt_problem(target, prompt, 4)
    assert prompt_problem(target, [3] * 508, 4) is None
    assert list(generate(target, [], max_new_tokens=4)) == []


def test_timings_progress_and_inference_mode_stay_outside():
    target, timings, seen = untied_target(), Timings(), []
    for _ in generate(
        target, PROMPTS, max_new_tokens=5, batch_size=2, stop_ids=(), timings=timings, progress=seen.append
    ):
        assert not torch.is_inference_mode_enabled()
    assert sum(seen) == timings.tokens == 5 * len(PROMPTS)
    assert timings.rounds == 12  # two rows at a time, then the fifth alone
    assert timings.total == pytest.approx(timings.prefill + timings.draft + timings.verify + timings.other)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_seconds_of_a_run_are_shared_by_its_rows(batch_size):
    """The shares of all answers add up to what the run booked, part by part, and no answer is free."""
    target = tiny_target()
    timings = Timings()
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [3]]
    options = dict(max_new_tokens=9, drafter=PromptLookup(target.vocab_size, 3), batch_size=batch_size, stop_ids=())
    completions = list(generate(target, prompts, timings=timings, **options))
    for part in ("prefill", "draft", "verify", "other"):
        shared = sum(getattr(completion.share, part) for completion in completions)
        assert shared == pytest.approx(getattr(timings, part), rel=1e-9), part
    assert min(completion.share.total for completion in completions) > 0
