"""Every attention kernel agrees with a float64 softmax over a materialised mask, in value and in gradient."""

import pytest
import torch

from deepspec.models import attention
from deepspec.models import split_attention as split
from deepspec.models.attention import attend
from deepspec.models.masks import Blocks, dense_mask, training_blocks

SEGMENTS_BS = torch.tensor([[0] * 13 + [1] * 17 + [-1] * 2, [2] * 32])
ANCHORS_BN = torch.tensor([[2, 5, 12, 15, 28, -1], [1, 7, 9, 20, 30, 31]])


def inputs(dtype, own=None, size=3, heads=4, kv_heads=2, dim=8, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    rows, context, count = 2, SEGMENTS_BS.shape[1], ANCHORS_BN.shape[1]
    own = size if own is None else own
    return (
        draw(rows, count * size, heads, dim),
        draw(rows, kv_heads, context, dim),
        draw(rows, kv_heads, context, dim),
        draw(rows, count * own, kv_heads, dim),
        draw(rows, count * own, kv_heads, dim),
    )


def naive(q, k, v, own_k, own_v, blocks, scale):
    """Float64: repeat the heads, lay out every key, softmax over the dense mask."""
    groups = q.shape[2] // k.shape[1]
    keys = torch.cat([k, own_k.transpose(1, 2)], 2).double().repeat_interleave(groups, 1)
    values = torch.cat([v, own_v.transpose(1, 2)], 2).double().repeat_interleave(groups, 1)
    scores = q.double().transpose(1, 2) @ keys.transpose(2, 3) * scale
    mask = dense_mask(blocks, k.shape[2])[:, None]
    return (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ values).transpose(1, 2)


def training(window=None, size=3):
    return training_blocks(SEGMENTS_BS, ANCHORS_BN, size, window)


def causal(own):
    """EAGLE-3's structure: one query per token, its document up to itself, and ``own`` later keys of its own."""
    starts = torch.tensor([[0] * 3 + [3] * 3, [0] * 6])
    ends = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]])
    return Blocks(starts, ends, queries=1, own=own)


@pytest.mark.parametrize("window", [None, 6, 3])
@pytest.mark.parametrize("kernel", ["split", "sdpa", "flex"])
def test_kernels_agree_forward(kernel, window):
    arguments = [tensor.detach() for tensor in inputs(torch.float32)]
    blocks = training(window)
    with torch.no_grad():
        out = attend(*arguments, blocks, 0.4, kernel=kernel)
    torch.testing.assert_close(out.double(), naive(*arguments, blocks, 0.4), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1 << 20, 150, 1])
@pytest.mark.parametrize("kernel", ["split", "sdpa"])
@pytest.mark.parametrize("window", [None, 4])
def test_gradients_agree(kernel, chunk, window, monkeypatch):
    monkeypatch.setattr(split, "_CHUNK_SCORES", chunk)
    arguments, reference = inputs(torch.float64), inputs(torch.float64)
    blocks = training(window)
    out, expected = attend(*arguments, blocks, 0.4, kernel=kernel), naive(*reference, blocks, 0.4)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-10)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for mine, theirs in zip(arguments, reference, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("own", [0, 2])
def test_blocks_of_one_query(own, monkeypatch):
    monkeypatch.setattr(split, "_CHUNK_SCORES", 60)
    arguments, reference = inputs(torch.float64, own, size=1), inputs(torch.float64, own, size=1)
    out, expected = attend(*arguments, causal(own), 0.3), naive(*reference, causal(own), 0.3)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-10)
    out.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    for mine, theirs in zip(arguments, reference, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-11, rtol=1e-9)


def test_gradcheck(monkeypatch):
    monkeypatch.setattr(split, "_CHUNK_SCORES", 30)
    segments_BS, anchors_BN = torch.tensor([[0, 0, 0, 1, 1, 1]]), torch.tensor([[1, 5]])
    blocks = training_blocks(segments_BS, anchors_BN, 2, 4)
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, 4, 2, 2), (1, 1, 6, 2), (1, 1, 6, 2), (1, 4, 1, 2), (1, 4, 1, 2)]
    arguments = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    assert torch.autograd.gradcheck(lambda *tensors: attend(*tensors, blocks, 0.7), arguments)


def test_no_grad_equals_grad_and_bfloat16_is_close():
    arguments = inputs(torch.float32)
    with torch.no_grad():
        free = attend(*arguments, training(), 0.4)
    torch.testing.assert_close(free, attend(*arguments, training(), 0.4).detach(), atol=0, rtol=0)
    low = attend(*inputs(torch.bfloat16), training(), 0.4)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), free, atol=3e-2, rtol=3e-2)


def test_other_blocks_and_other_documents_do_not_matter():
    arguments = [tensor.detach() for tensor in inputs(torch.float32)]
    out = attend(*arguments, training(), 0.4)
    q, k, v, own_k, own_v = (tensor.clone() for tensor in arguments)
    k[0, :, 13:], v[0, :, 13:] = 5.0, -7.0  # the second document and the padding
    own_k[0, 3:], own_v[0, 3:] = 3.0, 9.0  # every block but the first
    changed = attend(q, k, v, own_k, own_v, training(), 0.4)
    torch.testing.assert_close(changed[0, :3], out[0, :3], atol=0, rtol=0)


def test_compiled_without_graph_breaks():
    arguments = inputs(torch.float32)
    blocks = training()
    compiled = torch.compile(lambda *tensors: attend(*tensors, blocks, 0.4) * 2, fullgraph=True, backend="aot_eager")
    compiled(*arguments).sum().backward()
    reference = inputs(torch.float32)
    (attend(*reference, blocks, 0.4) * 2).sum().backward()
    for mine, theirs in zip(arguments, reference, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_device_that_refuses_flex_gets_the_split_kernel_and_says_so_once(monkeypatch, caplog):
    tried = []

    def refused(q_BQHC, *rest):
        tried.append(q_BQHC.shape[-1])
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(attention, "_flex", refused)
    monkeypatch.setattr(attention, "_flex_refused", set())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "small card")
    for dim in (8, 8, 16):
        arguments = inputs(torch.float32, dim=dim)
        out = attention._flex_or_split(*arguments, training(), 0.4)
        torch.testing.assert_close(out, split.split_attention(*arguments, training(), 0.4), atol=0, rtol=0)
    assert tried == [8, 16]  # another head dim is another kernel
    assert [record.getMessage() for record in caplog.records] == [
        f"flex attention failed on small card with head dim {dim}, using the split kernel: "
        "out of resource: shared memory"
        for dim in tried
    ]


def test_unknown_kernel_is_named():
    with pytest.raises(ValueError, match="'magic' is unknown"):
        attend(*inputs(torch.float32), training(), 0.4, kernel="magic")
