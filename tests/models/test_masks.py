"""Visibility of draft blocks against an index-by-index restatement of the rule."""

import pytest
import torch

from deepspec.models.masks import Blocks, block_mask_mod, decoding_blocks, dense_mask, document_starts, training_blocks

SEGMENTS_BS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, -1], [2, 2, 2, 2, 2, 2, 2, 2, 2, 2]])
ANCHORS_BN = torch.tensor([[1, 3, 6, -1], [2, 5, 9, -1]])


def naive(segments_BS, anchors_BN, size, window):
    """True where query g of block n sees a key: written key by key."""
    rows, context = segments_BS.shape
    count = anchors_BN.shape[1]
    seen = torch.zeros(rows, count * size, context + count * size, dtype=torch.bool)
    for b in range(rows):
        for n in range(count):
            anchor = int(anchors_BN[b, n])
            for g in range(size):
                query = n * size + g
                seen[b, query, context + n * size : context + (n + 1) * size] = True
                for key in range(context):
                    same = anchor >= 0 and segments_BS[b, key] == segments_BS[b, anchor]
                    near = window is None or anchor + g - key < window
                    seen[b, query, key] = same and key < anchor and near
    return seen


@pytest.mark.parametrize("window", [None, 5, 3])
def test_dense_mask_is_the_rule(window):
    blocks = training_blocks(SEGMENTS_BS, ANCHORS_BN, 3, window)
    assert torch.equal(dense_mask(blocks, SEGMENTS_BS.shape[1]), naive(SEGMENTS_BS, ANCHORS_BN, 3, window))


def test_absent_block_sees_only_itself():
    blocks = training_blocks(SEGMENTS_BS, ANCHORS_BN, 3)
    mask = dense_mask(blocks, 10)
    assert not mask[:, 9:, :10].any()
    assert mask[:, 9:, 19:].all()


def test_decoding_equals_training_with_the_same_anchor():
    one_document = torch.zeros(2, 10, dtype=torch.long)
    anchors_BN = torch.tensor([[4], [7]])
    trained = dense_mask(training_blocks(one_document, anchors_BN, 4, 6), 10)
    decoded = dense_mask(decoding_blocks(anchors_BN[:, 0], 4, 6), 10)
    assert torch.equal(trained, decoded)


def test_document_starts():
    assert document_starts(SEGMENTS_BS).tolist() == [[0, 0, 0, 0, 4, 4, 4, 4, 4, 9], [0] * 10]


def test_blocks_without_own_keys_see_context_alone():
    ends = torch.tensor([[1, 2, 3]])
    blocks = Blocks(torch.zeros_like(ends), ends, queries=1, own=0)
    assert torch.equal(dense_mask(blocks, 3)[0], torch.ones(3, 3).tril().bool())


def test_mask_mod_broadcasts_over_heads():
    blocks = training_blocks(SEGMENTS_BS, ANCHORS_BN, 2)
    mod = block_mask_mod(blocks, 10)
    b, h, q, kv = torch.tensor(0), torch.tensor(5), torch.tensor(2), torch.tensor(0)
    assert bool(mod(b, h, q, kv))
    assert not bool(mod(b, h, q, torch.tensor(3)))
