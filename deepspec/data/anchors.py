"""Anchor draws, block validity and position weights: pure functions of the batch and a seeded generator.

Shapes: B rows, S tokens of a row, N anchors of a row, G block size. Knows nothing of models, ranks or files.
"""

import hashlib

import torch


def generator(seed: int, epoch: int, sample_id: str) -> torch.Generator:
    """CPU generator that depends on (seed, epoch, sample id) alone: the same over runs, ranks and batch order.

    torch seeds its CPU generator with the low 32 bits, so among a million samples some hundred pairs share a stream:
    each still has its own candidates, and no sample has the same anchors in two epochs because of it.
    """
    digest = hashlib.sha256(f"{seed}\x00{epoch}\x00{sample_id}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def candidates(supervised_S: torch.Tensor) -> torch.Tensor:
    """Positions of one document that may be an anchor: it and the token after it are both supervised. Ascending int64.

    Source: DSpark (arXiv 2607.05147), training. In decoding the anchor is always a committed answer token.
    """
    return torch.nonzero(supervised_S[:-1] & supervised_S[1:]).flatten()


def draw(supervised_S: torch.Tensor, n: int, generator: torch.Generator) -> torch.Tensor:
    """``n`` anchors without replacement, ascending, int64; with fewer candidates all of them, then −1 (absent)."""
    positions = candidates(supervised_S)
    if len(positions) > n:
        chosen = torch.randperm(len(positions), generator=generator)[:n]
        return positions[chosen].sort().values
    absent = positions.new_full((n - len(positions),), -1)
    return torch.cat([positions, absent])


def block_valid(
    supervised_BS: torch.Tensor, segments_BS: torch.Tensor, anchors_BN: torch.Tensor, block_size: int
) -> torch.Tensor:
    """valid_BNG: whether position k = 1…G of the block at anchor a counts.

    It does when tokens a+1 … a+k are all supervised and of a's document, so the result is a contiguous prefix per
    block; blocks of absent anchors (−1) are False throughout.
    """
    length = supervised_BS.shape[1]
    start_BN = anchors_BN.clamp(min=0)
    steps_G = torch.arange(1, block_size + 1, device=anchors_BN.device)
    at_BNG = start_BN[:, :, None] + steps_G
    inside_BNG = (at_BNG < length) & (anchors_BN >= 0)[:, :, None]
    at_BNG = at_BNG.clamp(max=length - 1)
    supervised_BNG = gather_tokens(supervised_BS, at_BNG)
    same_BNG = gather_tokens(segments_BS, at_BNG) == gather_tokens(segments_BS, start_BN[:, :, None])
    return (inside_BNG & supervised_BNG & same_BNG).to(torch.int8).cumprod(-1).bool()


def gather_tokens(values_BS: torch.Tensor, at_BNG: torch.Tensor) -> torch.Tensor:
    """values_BNG with values_BNG[b, n, g] = values_BS[b, at_BNG[b, n, g]]; every index must lie in [0, S)."""
    return values_BS.gather(1, at_BNG.flatten(1)).view(at_BNG.shape)


def position_weights(block_size: int, decay: float = 4.0, device: torch.device | None = None) -> torch.Tensor:
    """w_k = exp(−(k−1)/decay) for k = 1…block_size, float32; ``decay=inf`` weighs every position alike."""
    if not decay > 0:
        raise ValueError(f"decay is {decay}: give a positive number of positions, or inf for uniform weights")
    return torch.exp(-torch.arange(block_size, dtype=torch.float32, device=device) / decay)
