"""Kernel dispatch of the drafters' attention, the only place that chooses one.

Context keys and own-block keys are softmaxed together but never laid out together, so no block ever holds another's.
Shapes: B rows, Q = N·G queries, S context keys, O = N·J own keys, H query heads, K key-value heads, C head dimension.
"""

import functools
import logging

import torch
from torch import Tensor
from torch.nn import functional as F

from deepspec.models.masks import Blocks, block_mask_mod, dense_mask
from deepspec.models.split_attention import split_attention

KERNELS = ("auto", "split", "sdpa", "flex")
_FLEX_MIN_QUERIES = 128
_log = logging.getLogger(__name__)
_flex_refused: set[tuple[str, int]] = set()


def attend(
    q_BQHC: Tensor,
    k_BKSC: Tensor,
    v_BKSC: Tensor,
    own_k_BOKC: Tensor,
    own_v_BOKC: Tensor,
    blocks: Blocks,
    scale: float,
    kernel: str = "auto",
) -> Tensor:
    """Softmax attention of draft queries over what ``blocks`` lets them see; returns [B, Q, H, C].

    ``kernel`` "auto" takes flex attention on CUDA where there are many queries, and the split two-part softmax
    otherwise; flex falls back to split, once and loudly, where the device refuses it. Raises ValueError for a kernel
    that does not exist. Every kernel gives the same result (tests/models/test_attention.py).
    """
    if kernel not in KERNELS:
        raise ValueError(f"attention kernel {kernel!r} is unknown: choose one of {', '.join(KERNELS)}")
    arguments = (q_BQHC, k_BKSC, v_BKSC, own_k_BOKC, own_v_BOKC, blocks, scale)
    if kernel == "sdpa":
        return _sdpa(*arguments)
    if kernel == "flex":
        return _flex(*arguments)
    if kernel == "auto" and q_BQHC.is_cuda and q_BQHC.shape[1] >= _FLEX_MIN_QUERIES:
        return _flex_or_split(*arguments)
    return split_attention(*arguments)


def _flex_or_split(q_BQHC: Tensor, *rest) -> Tensor:
    device = (torch.cuda.get_device_name(q_BQHC.device), q_BQHC.shape[-1])
    if device not in _flex_refused:
        try:
            return _flex(q_BQHC, *rest)
        except torch.OutOfMemoryError:
            raise  # says nothing of the kernel
        except Exception as error:  # compilers raise many types here; too little shared memory is the usual one
            _flex_refused.add(device)
            _log.warning("flex attention failed on %s with head dim %d, using the split kernel: %s", *device, error)
    return split_attention(q_BQHC, *rest)


def _joined(context_BKSC: Tensor, own_BOKC: Tensor) -> Tensor:
    return torch.cat([context_BKSC, own_BOKC.transpose(1, 2)], dim=2)


def _flex(q_BQHC, k_BKSC, v_BKSC, own_k_BOKC, own_v_BOKC, blocks: Blocks, scale: float) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    run = _compiled_flex() if q_BQHC.is_cuda else flex_attention
    mask = _block_mask(blocks, k_BKSC.shape[2])
    k_BKTC, v_BKTC = _joined(k_BKSC, own_k_BOKC), _joined(v_BKSC, own_v_BOKC)
    out_BHQC = run(q_BQHC.transpose(1, 2), k_BKTC, v_BKTC, block_mask=mask, scale=scale, enable_gqa=True)
    return out_BHQC.transpose(1, 2)


def _sdpa(q_BQHC, k_BKSC, v_BKSC, own_k_BOKC, own_v_BOKC, blocks: Blocks, scale: float) -> Tensor:
    mask_B1QT = dense_mask(blocks, k_BKSC.shape[2])[:, None]
    out_BHQC = F.scaled_dot_product_attention(
        q_BQHC.transpose(1, 2),
        _joined(k_BKSC, own_k_BOKC),
        _joined(v_BKSC, own_v_BOKC),
        attn_mask=mask_B1QT,
        scale=scale,
        enable_gqa=True,
    )
    return out_BHQC.transpose(1, 2)


@functools.lru_cache(maxsize=2)
def _block_mask(blocks: Blocks, context: int):
    """Built once per forward: ``blocks`` compares by identity, and the layers of one forward share it."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, queries = blocks.end_BN.shape[0], blocks.count * blocks.queries
    keys = context + blocks.count * blocks.own
    return create_block_mask(block_mask_mod(blocks, context), rows, None, queries, keys, device=blocks.end_BN.device)


@functools.cache
def _compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
