"""Visibility of keys to draft queries: an interval of context in their own document, and their own block.

Two documents in a row of nine tokens, blocks of three queries at the anchors 3 and 6:

                    context keys                  own keys
                    0 1 2 3 4 | 5 6 7 8           block 0   block 1
    block 0 (a=3)   █ █ █ · · | · · · ·           █ █ █     · · ·         strictly before its anchor
    block 1 (a=6)   · · · · · | █ · · ·           · · ·     █ █ █         and never another document

The same structure has three renderings: intervals, a mask_mod for flex attention, and a dense mask. Keys are laid out
as S context keys followed by the N·J own keys of the blocks (J = G for block drafters).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Blocks:
    """N blocks of G queries per row; block n sees the context keys [start, end) and the ``own`` keys of its block.

    start_BN  first context key of the block's document
    end_BN    one past the last context key, which for a block drafter is the anchor; equal to start: no context
    queries   G, queries per block
    own       J, own keys per block
    window    query g of a block sees context key j only if (end + g) − j < window; None: no limit
    """

    start_BN: Tensor
    end_BN: Tensor
    queries: int
    own: int
    window: int | None = None

    @property
    def count(self) -> int:
        """N, the number of blocks per row."""
        return self.start_BN.shape[1]

    def first_BNG(self) -> Tensor:
        """First visible context key of each query; beyond ``end`` where the window holds no context."""
        start_BNG = self.start_BN[..., None].expand(-1, -1, self.queries)
        if self.window is None:
            return start_BNG
        offsets_G = torch.arange(self.queries, device=self.end_BN.device)
        return torch.maximum(start_BNG, self.end_BN[..., None] + offsets_G + 1 - self.window)


def document_starts(segments_BS: Tensor) -> Tensor:
    """Index of the first token of each token's document; ``segments_BS`` are contiguous document indices."""
    index_S = torch.arange(segments_BS.shape[1], device=segments_BS.device)
    opens_BS = torch.ones_like(segments_BS, dtype=torch.bool)
    opens_BS[:, 1:] = segments_BS[:, 1:] != segments_BS[:, :-1]
    return torch.where(opens_BS, index_S, 0).cummax(dim=1).values


def training_blocks(segments_BS: Tensor, anchors_BN: Tensor, block_size: int, window: int | None = None) -> Blocks:
    """Blocks of a packed batch: block n sees its document strictly before its anchor; absent (−1) ones no context."""
    end_BN = anchors_BN.clamp(min=0)
    start_BN = torch.where(anchors_BN >= 0, document_starts(segments_BS).gather(1, end_BN), 0)
    return Blocks(start_BN, end_BN, queries=block_size, own=block_size, window=window)


def decoding_blocks(lengths_B: Tensor, block_size: int, window: int | None = None) -> Blocks:
    """One block per row after ``lengths_B`` tokens of context: the anchor stands at position lengths_B."""
    end_BN = lengths_B[:, None]
    return Blocks(torch.zeros_like(end_BN), end_BN, queries=block_size, own=block_size, window=window)


def block_mask_mod(blocks: Blocks, context: int) -> MaskMod:
    """mask_mod(b, h, q, kv) for flex attention over ``context`` context keys followed by the N·J own keys."""
    queries = blocks.queries
    own = max(blocks.own, 1)  # a divisor; without own keys no key reaches it
    first_BQ = blocks.first_BNG().flatten(1).contiguous()
    end_BN = blocks.end_BN.contiguous()

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block = q // queries
        is_context = kv < context
        in_interval = (kv >= first_BQ[b, q]) & (kv < end_BN[b, block])
        in_own_block = (kv - context) // own == block
        return (is_context & in_interval) | (~is_context & in_own_block)

    return mask_mod


def dense_mask(blocks: Blocks, context: int) -> Tensor:
    """The same structure as a boolean tensor [B, N·G, context + N·J]; True is visible."""
    device = blocks.end_BN.device
    b = torch.arange(blocks.end_BN.shape[0], device=device)[:, None, None]
    q = torch.arange(blocks.count * blocks.queries, device=device)[None, :, None]
    kv = torch.arange(context + blocks.count * blocks.own, device=device)[None, None, :]
    return block_mask_mod(blocks, context)(b, torch.zeros_like(b), q, kv)
