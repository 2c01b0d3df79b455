"""Collation and packing against layouts worked out by hand."""

import dataclasses

import pytest
import torch

from deepspec.data.batch import BatchError, Sample, collate, empty_batch, pack

F, D = 6, 4


def sample(name: str, supervised: str, offset: float = 0.0) -> Sample:
    """Tokens 10, 11, …; taps and last states that say which token they belong to."""
    flags = torch.tensor([character == "1" for character in supervised])
    length = len(supervised)
    places = offset + torch.arange(length, dtype=torch.float32)
    has_last = torch.nonzero(flags[1:]).flatten()
    return Sample(
        id=name,
        tokens_S=10 + torch.arange(length),
        supervised_S=flags,
        taps_SF=places[:, None].expand(length, F).clone(),
        last_ID=places[has_last, None].expand(-1, D).clone(),
    )


def batched(samples, **options):
    return collate(samples, **{"anchors_per_sample": 2, "block_size": 3, "seed": 0, "epoch": 0} | options)


def test_one_document_per_row_by_hand():
    batch = batched([sample("a", "00110"), sample("b", "111", offset=100)])
    assert batch.tokens_BS.tolist() == [[10, 11, 12, 13, 14], [10, 11, 12, 0, 0]]
    assert batch.positions_BS.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 0, 0]]
    assert batch.segments_BS.tolist() == [[0, 0, 0, 0, 0], [1, 1, 1, -1, -1]]
    assert batch.supervised_BS.int().tolist() == [[0, 0, 1, 1, 0], [1, 1, 1, 0, 0]]
    # "a": tokens 2 and 3 are labels, p for them comes from positions 1 and 2; "b": labels 1 and 2 from 0 and 1
    assert batch.last_row_BS.tolist() == [[-1, 0, 1, -1, -1], [2, 3, -1, -1, -1]]
    assert batch.last_LD[:, 0].tolist() == [1, 2, 100, 101]
    assert batch.taps_BSF[1, :, 0].tolist() == [100, 101, 102, 0, 0]
    assert batch.anchors_BN.tolist() == [[2, -1], [0, 1]]
    assert batch.ids == ["a", "b"]


def test_log_normalisers_lie_beside_their_states():
    known = [
        dataclasses.replace(one, log_z_I=one.last_ID[:, 0] / 2, top_I=one.last_ID[:, 0].long() + 1)
        for one in (sample("a", "00110"), sample("b", "111", offset=100))
    ]
    batch = batched(known).to("cpu", torch.bfloat16)
    assert batch.log_z_L.tolist() == [0.5, 1, 50, 50.5]
    assert batch.log_z_L.dtype == torch.float32
    assert batch.top_L.tolist() == [2, 3, 101, 102]
    assert batched([known[0], sample("c", "011")]).log_z_L is None


def test_packing_by_hand():
    samples = [sample("a", "00110"), sample("b", "111"), sample("c", "011"), sample("d", "0")]
    batch = batched(samples, pack_tokens=8)
    # first fit: a and b fill the first row (5 + 3), c and d share the second
    assert batch.segments_BS.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1], [2, 2, 2, 3, -1, -1, -1, -1]]
    assert batch.positions_BS.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 0, 0, 0, 0, 0]]
    assert batch.last_row_BS.tolist() == [[-1, 0, 1, -1, -1, 2, 3, -1], [4, 5, -1, -1, -1, -1, -1, -1]]
    assert batch.anchors_BN.tolist() == [[2, 5, 6], [1, -1, -1]]
    assert batch.ids == ["a", "b", "c", "d"]


def test_first_fit_fills_earlier_gaps():
    assert pack([6, 7, 3, 2, 1], 10) == [[0, 2, 4], [1, 3]]
    assert pack([6, 7], None) == [[0], [1]]


def test_states_and_anchors_are_the_same_packed_or_not():
    samples = [sample(f"doc{i}", "0" * i + "1" * (20 - i), offset=100.0 * i) for i in range(5)]
    found = []
    for pack_tokens in (None, 45, 100):
        batch = batched(samples, anchors_per_sample=4, pack_tokens=pack_tokens)
        seen = {}
        for b, row in enumerate(batch.anchors_BN.tolist()):
            for anchor in (a for a in row if a >= 0):
                document = batch.ids[batch.segments_BS[b, anchor]]
                seen.setdefault(document, []).append(
                    (
                        int(batch.positions_BS[b, anchor]),
                        batch.taps_BSF[b, anchor, 0].item(),
                        batch.last_LD[batch.last_row_BS[b, anchor], 0].item(),
                    )
                )
        found.append(seen)
    assert found[0] == found[1] == found[2]
    assert {name: len(anchors) for name, anchors in found[0].items()} == {f"doc{i}": 4 for i in range(5)}
    assert all(tap == last for anchors in found[0].values() for _, tap, last in anchors)


def test_order_of_neighbours_changes_no_draw():
    samples = [sample(name, "1" * 40) for name in "abc"]
    forward, backward = batched(samples), batched(samples[::-1])
    assert torch.equal(forward.anchors_BN, backward.anchors_BN.flip(0))


def test_conversion_touches_states_only():
    batch = batched([sample("a", "00110")]).to("cpu", torch.bfloat16)
    assert batch.taps_BSF.dtype == batch.last_LD.dtype == torch.bfloat16
    assert batch.tokens_BS.dtype == batch.last_row_BS.dtype == torch.int64
    assert batch.supervised_BS.dtype == torch.bool


def test_empty_batch_counts_nothing():
    batch = empty_batch(F, D, length=5, anchors=3, states=2, dtype=torch.bfloat16)
    assert (batch.anchors_BN == -1).all()
    assert batch.anchors_BN.shape == (1, 3)
    assert (batch.last_row_BS == -1).all()
    assert not batch.supervised_BS.any()
    assert (batch.segments_BS == 0).all()
    assert batch.taps_BSF.shape == (1, 5, F)
    assert batch.last_LD.shape == (2, D)
    assert batch.taps_BSF.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        ([], {}, "empty_batch"),
        ([dataclasses.replace(sample("bad", "011"), last_ID=torch.zeros(1, D))], {}, "'bad': 1 last states for 2"),
        ([dataclasses.replace(sample("bad", "011"), taps_SF=torch.zeros(2, F))], {}, "'bad': 3 tokens"),
        ([sample("x", "01"), dataclasses.replace(sample("y", "01"), taps_SF=torch.zeros(2, F + 1))], {}, "'x' and 'y'"),
        ([sample("long", "0111")], {"pack_tokens": 3}, "'long' has 4 tokens.*data.pack_tokens"),
        ([sample("a", "01")], {"block_size": 0}, "block_size 0"),
    ],
)
def test_errors_name_the_sample_and_the_remedy(samples, options, message):
    with pytest.raises(BatchError, match=message):
        batched(samples, **options)
