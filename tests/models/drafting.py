"""Shared by the drafter tests: random packed batches, drafters with non-trivial weights, and their logits."""

import torch

from deepspec.data.batch import DraftBatch, Sample, collate
from deepspec.models.block_drafter import BlockDrafter
from deepspec.models.draft_config import draft_config
from deepspec.models.drafter_config import DrafterConfig
from deepspec.models.eagle3 import Eagle3Drafter
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.sampling import Distribution, Sampling
from tests.tiny import VOCAB, tiny_config

WIDTH, TAPS = 32, (0, 1, 2)


def samples(lengths=(19, 11, 26), seed=0, vocab=VOCAB):
    """Documents whose last two thirds are supervised; states are noise of a size like a target's."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index, length in enumerate(lengths):
        supervised_S = torch.arange(length) >= length // 3
        made.append(
            Sample(
                id=f"s{seed}-{index}",
                tokens_S=torch.randint(vocab, (length,), generator=generator),
                supervised_S=supervised_S,
                taps_SF=torch.randn(length, len(TAPS) * WIDTH, generator=generator),
                last_ID=torch.randn(int(supervised_S[1:].sum()), WIDTH, generator=generator),
            )
        )
    return made


def batch(made=None, anchors=4, block_size=4, pack_tokens=None, seed=0) -> DraftBatch:
    return collate(
        samples() if made is None else made,
        anchors_per_sample=anchors,
        block_size=block_size,
        seed=seed,
        epoch=0,
        pack_tokens=pack_tokens,
    )


def frozen_head(family="qwen3", seed=3, vocab=VOCAB):
    generator = torch.Generator().manual_seed(seed)
    embed, head = (torch.randn(vocab, WIDTH, generator=generator) for _ in range(2))
    gemma = family.startswith("gemma")
    return FrozenHead(
        embed, head, embed_scale=WIDTH**0.5 if gemma else 1.0, softcap=20.0 if family == "gemma4" else None
    )


def shake(module, seed=5):
    """Move every parameter off its neutral start, so that no head or norm is a no-op."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return module


def drafter(family="qwen3", draft_ids=None, config_overrides=None, **options):
    """A tiny shaken drafter; two layers for block drafters."""
    options.setdefault("block_size", 4)
    eagle = options.get("kind") == "eagle3"
    options.setdefault("layers", 1 if eagle else 2)
    if options.get("kind", "dspark") == "dspark":
        options.setdefault("markov_rank", 6)
    if draft_ids is not None:
        options["draft_vocab_size"] = len(draft_ids)
    cfg = DrafterConfig(**options)
    hf_config = draft_config(cfg, tiny_config(family, **(config_overrides or {})), TAPS, VOCAB)
    kind = Eagle3Drafter if eagle else BlockDrafter
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return shake(kind(cfg, hf_config, frozen_head(family), draft_ids).eval())


def logits(drafter_, hidden, markov=None):
    """Draft logits of hidden states, the definition: capped head plus Markov bias."""
    out = drafter_.vocabulary.head(drafter_.head).logits(hidden)
    return out if markov is None else out + markov @ drafter_.markov_weight_VR.T


def forced_proposal(drafter_, state, anchor_1, following):
    """One proposal whose draws are forced to the ids ``following``: (draft logits [G, V], the proposal)."""
    size, seen = drafter_.block_size, []
    following = torch.cat([following, torch.zeros(size, dtype=torch.long)])[:size]

    def distribution(row_logits, sampling):
        at = sum(part.shape[0] for part in seen)
        block = row_logits.dim() == 3
        seen.append(row_logits[0] if block else row_logits)
        return Distribution.one_hot(following[None] if block else following[at : at + 1], VOCAB)

    drafter_.vocabulary.distribution = distribution  # hides the method
    try:
        proposal = drafter_.propose(state, anchor_1, Sampling(), torch.zeros(1, size), size)
    finally:
        del drafter_.vocabulary.distribution
    return torch.cat(seen), proposal


def gradients_and_kept(model, batch_of, hidden) -> tuple[dict, int]:
    """Gradients by name of the squared hidden states, and the bytes that forward kept for backward."""
    kept: dict[int, int] = {}

    def pack(value):
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        loss = hidden(model.training_forward(batch_of)).square().sum()
    loss.backward()
    named = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    return named, sum(kept.values())
