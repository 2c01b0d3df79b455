"""The fused loss against plain autograd over full logits in float64: every term, every gradient, every way to chunk."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepspec.train.losses import Coefficients, KnownTarget, LogitsHead, fused_loss
from deepspec.train.row_plan import RowPlan

TERMS = ("ce_X", "tv_X", "soft_X", "lk_X")
X, L, D, R, V = 23, 9, 6, 4, 31


def case(seed=0, markov=True, softcap: float | None = None, reduced=False, dtype=torch.float64, scale=2.0):
    """Inputs with duplicated targets, a row without a target and rows of zero weight."""
    g = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(dtype)

    index_X = torch.randint(0, L - 2, (X,), generator=g)
    index_X[4], index_X[7:12] = -1, 3
    ids_V = torch.randperm(V, generator=g)[:17] if reduced else None
    words = V if ids_V is None else len(ids_V)
    weights = {name: torch.rand(X, generator=g, dtype=torch.float64).to(dtype) for name in TERMS}
    for weight_X in weights.values():
        weight_X[[2, 15]] = 0
    return {
        "h_XD": random(X, D, scale=scale).requires_grad_(),
        "m_XR": random(X, R).requires_grad_() if markov else None,
        "w2_VR": random(words, R).requires_grad_() if markov else None,
        "head": LogitsHead(random(V, D), softcap, ids_V),
        "last_LD": random(L, D, scale=scale),
        "index_X": index_X,
        "labels_X": torch.randint(0, V, (X,), generator=g),
        "weights": weights,
    }


def fused(inputs: dict, terms=TERMS, **options):
    coefficients = Coefficients(**{name: inputs["weights"][name] for name in terms})
    return fused_loss(
        inputs["h_XD"],
        inputs["head"],
        inputs["last_LD"],
        inputs["index_X"],
        inputs["labels_X"],
        coefficients,
        m_XR=inputs["m_XR"],
        w2_VR=inputs["w2_VR"],
        **options,
    )


def naive(inputs: dict, terms=TERMS) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Row by row from the definitions, over dense logits and the whole target vocabulary."""
    head = inputs["head"]
    total = inputs["h_XD"].new_zeros(())
    rows = {name: inputs["h_XD"].new_zeros(X) for name in ("ce_X", "tv_X", "soft_X", "accept_X", "top1_X")}

    def capped(states: torch.Tensor) -> torch.Tensor:
        logits = states @ head.head_TD.T
        return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)

    ids = torch.arange(V) if head.draft_ids_V is None else head.draft_ids_V
    for x in range(X):
        if inputs["index_X"][x] < 0 or all(inputs["weights"][name][x] == 0 for name in terms):
            continue
        z = capped(inputs["h_XD"][x])[ids]
        if inputs["m_XR"] is not None:
            z = z + inputs["w2_VR"] @ inputs["m_XR"][x]
        p = torch.softmax(capped(inputs["last_LD"][inputs["index_X"][x]]), -1)
        q = torch.zeros(V, dtype=z.dtype).index_put((ids,), torch.softmax(z, -1))
        label = int(inputs["labels_X"][x])
        known = bool((ids == label).any())
        tv = (q - p).abs().sum()
        values = {
            "ce_X": F.cross_entropy(z[None], (ids == label).nonzero()[0]) if known else z.sum() * 0,
            "tv_X": tv,
            "soft_X": -(p[ids] * torch.log_softmax(z, -1)).sum(),
            "lk_X": -torch.log(1 - tv / 2),
        }
        total = total + sum(inputs["weights"][name][x] * values[name] for name in terms)
        for name in ("ce_X", "tv_X", "soft_X"):
            rows[name][x] = values[name].detach()
        rows["accept_X"][x] = torch.minimum(p, q).sum().detach()
        rows["top1_X"][x] = float(q.argmax() == p.argmax())
    return total, rows


def gradients(total: torch.Tensor, inputs: dict) -> list[torch.Tensor]:
    leaves = [inputs[name] for name in ("h_XD", "m_XR", "w2_VR") if inputs[name] is not None]
    return list(torch.autograd.grad(total, leaves))


def row_bytes(rows: int, words: int = V) -> int:
    return rows * 8 * (words + V)


@pytest.mark.parametrize("markov", [True, False], ids=["markov", "plain"])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["linear", "softcap"])
@pytest.mark.parametrize("reduced", [False, True], ids=["full", "draft-vocabulary"])
def test_values_and_gradients_equal_dense_autograd(markov, softcap, reduced):
    inputs = case(markov=markov, softcap=softcap, reduced=reduced)
    expected_total, expected = naive(inputs)
    expected_gradients = gradients(expected_total, inputs)
    for rows in (1, 7, 1000):
        losses = fused(inputs, chunk_bytes=row_bytes(rows))
        torch.testing.assert_close(losses.total, expected_total)
        for name, value in expected.items():
            torch.testing.assert_close(getattr(losses, name), value, msg=lambda text, name=name: f"{name}: {text}")
        for mine, reference in zip(gradients(losses.total * 3, inputs), expected_gradients, strict=True):
            torch.testing.assert_close(mine, 3 * reference)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["linear", "softcap"])
@pytest.mark.parametrize("reduced", [False, True], ids=["full", "draft-vocabulary"])
def test_no_tensor_holds_more_than_a_chunk_of_logits(softcap, reduced, monkeypatch):
    """Chunks of 4 of 120 rows, forward and backward; everything but logits is far smaller than 4 of their rows."""
    count, rows, width, target_words = 120, 4, 2, 400
    ids_V = torch.arange(0, target_words, 2) if reduced else None
    words = target_words if ids_V is None else len(ids_V)
    g = torch.Generator().manual_seed(0)
    inputs = {
        "h_XD": torch.randn(count, width, generator=g, dtype=torch.float64).requires_grad_(),
        "m_XR": torch.randn(count, width, generator=g, dtype=torch.float64).requires_grad_(),
        "w2_VR": torch.randn(words, width, generator=g, dtype=torch.float64).requires_grad_(),
        "head": LogitsHead(torch.randn(target_words, width, generator=g, dtype=torch.float64), softcap, ids_V),
        "last_LD": torch.randn(count // 2, width, generator=g, dtype=torch.float64),
        "index_X": torch.arange(count) // 2,
        "labels_X": torch.randint(target_words, (count,), generator=g),
        "weights": dict.fromkeys(TERMS, torch.ones(count, dtype=torch.float64)),
    }
    # tiles of two rows: each has two buffers
    monkeypatch.setattr("deepspec.train.losses.CPU_TILE_BYTES", 2 * 8 * words)
    for chunk_bytes, logits in ((rows * 8 * (words + target_words), rows), (None, count)):
        with Largest() as largest:
            fused(inputs, chunk_bytes=chunk_bytes).total.backward()
        assert largest.elements == logits * words


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["linear", "softcap"])
def test_known_normalisers_change_nothing(softcap):
    inputs = case(softcap=softcap, reduced=True)
    head = inputs["head"]
    logits_LT = inputs["last_LD"] @ head.head_TD.T
    if softcap:
        logits_LT = softcap * torch.tanh(logits_LT / softcap)
    known = KnownTarget(logits_LT.logsumexp(-1), logits_LT.argmax(-1))
    expected = fused(inputs)
    # the rest of the head is not even looked at
    poisoned_TD = torch.full_like(head.head_TD, torch.nan).index_copy(
        0, head.draft_ids_V, head.head_TD[head.draft_ids_V]
    )
    inputs["head"] = LogitsHead(poisoned_TD, softcap, head.draft_ids_V)
    losses = fused(inputs, known=known, chunk_bytes=row_bytes(5))
    for name in ("total", "ce_X", "tv_X", "soft_X", "accept_X", "top1_X"):
        torch.testing.assert_close(
            getattr(losses, name), getattr(expected, name), msg=lambda text, n=name: f"{n}: {text}"
        )
    inputs["head"] = head
    for mine, reference in zip(gradients(losses.total, inputs), gradients(expected.total, inputs), strict=True):
        torch.testing.assert_close(mine, reference)
    assert torch.equal(fused(case(), known=known).total, fused(case()).total)


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("reduced", [False, True], ids=["full", "draft-vocabulary"])
def test_each_term_alone(term, reduced):
    inputs = case(seed=1, reduced=reduced)
    expected, _ = naive(inputs, (term,))
    losses = fused(inputs, (term,))
    torch.testing.assert_close(losses.total, expected)
    for mine, reference in zip(gradients(losses.total, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(mine, reference)


class Recomputed(torch.autograd.Function):
    """The fused loss computed again in each backward: gradcheck walks one graph several times, the loss allows one."""

    @staticmethod
    def forward(ctx, loss, *leaves):
        ctx.loss = loss
        ctx.save_for_backward(*leaves)
        return loss(*leaves)

    @staticmethod
    def backward(ctx, grad_output):
        leaves = [leaf.detach().requires_grad_() for leaf in ctx.saved_tensors]
        with torch.enable_grad():
            return None, *torch.autograd.grad(ctx.loss(*leaves), leaves, grad_output)


def test_gradcheck():
    inputs = case(seed=2, softcap=4.0)
    inputs["head"] = LogitsHead(inputs["head"].head_TD[:7], 4.0)
    inputs["labels_X"] %= 7
    rows = {name: inputs[name][5:9] for name in ("index_X", "labels_X")}
    rows["weights"] = {name: weight_X[5:9] for name, weight_X in inputs["weights"].items()}
    sizes = {"h_XD": 4, "m_XR": 4, "w2_VR": 7}
    leaves = [inputs[name].detach()[:size].requires_grad_() for name, size in sizes.items()]

    def loss(*given):
        return fused({**inputs, **rows, **dict(zip(sizes, given, strict=True))}).total

    assert torch.autograd.gradcheck(lambda *given: Recomputed.apply(loss, *given), leaves)


def test_float32_agrees_with_float64():
    exact, single = case(seed=3, scale=0.7), case(seed=3, scale=0.7, dtype=torch.float32)
    expected, _ = naive(exact)
    losses = fused(single)
    torch.testing.assert_close(losses.total.double(), expected, rtol=1e-5, atol=1e-6)
    for mine, reference in zip(gradients(losses.total, single), gradients(expected, exact), strict=True):
        torch.testing.assert_close(mine.double(), reference, rtol=1e-4, atol=1e-5)


def test_bfloat16_inputs_give_float32_results_and_bfloat16_gradients():
    half = case(seed=4, dtype=torch.bfloat16)
    losses = fused(half)
    assert losses.total.dtype == losses.accept_X.dtype == torch.float32
    exact = {
        name: value.detach().double().requires_grad_(value.requires_grad) if torch.is_floating_point(value) else value
        for name, value in half.items()
        if isinstance(value, torch.Tensor)
    }
    exact["head"] = LogitsHead(half["head"].head_TD.double())
    exact["weights"] = {name: weight_X.double() for name, weight_X in half["weights"].items()}
    expected, _ = naive(exact)
    torch.testing.assert_close(losses.total.double(), expected, rtol=2e-2, atol=0)
    for mine, reference in zip(gradients(losses.total, half), gradients(expected, exact), strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - reference).norm() < 0.03 * reference.norm()


def test_only_hidden_states_and_markov_weights_get_gradients():
    inputs = case()
    inputs["last_LD"].requires_grad_()
    inputs["head"].head_TD.requires_grad_()
    losses = fused(inputs)
    losses.total.backward()
    assert inputs["last_LD"].grad is None
    assert inputs["head"].head_TD.grad is None
    assert not any(value.requires_grad for name, value in vars(losses).items() if name != "total")
    unused = (inputs["index_X"] < 0) | (torch.stack(list(inputs["weights"].values())) == 0).all(0)
    assert inputs["h_XD"].grad[unused].abs().max() == 0
    assert inputs["h_XD"].grad[~unused].abs().amax(-1).min() > 0


def test_skipped_rows_are_not_read():
    inputs, poisoned = case(), case()
    skipped = [2, 4, 15]
    with torch.no_grad():
        poisoned["h_XD"][skipped] = float("nan")
        poisoned["last_LD"][L - 2 :] = float("nan")
    torch.testing.assert_close(fused(poisoned).total, fused(inputs).total, rtol=0, atol=0)


def test_a_plan_adds_rows_of_zero_weight_to_the_metrics_only():
    inputs = case()
    everything = RowPlan.of(inputs["index_X"], inputs["index_X"] >= 0)
    losses = fused(inputs, plan=everything)
    torch.testing.assert_close(losses.total, fused(inputs).total)
    assert losses.accept_X[2] > 0
    assert fused(inputs).accept_X[2] == 0


def test_no_rows_keep_the_graph_connected():
    inputs = case()
    inputs["index_X"].fill_(-1)
    losses = fused(inputs)
    assert losses.total == 0
    assert all(gradient.abs().max() == 0 for gradient in gradients(losses.total, inputs))


def test_evaluation_needs_no_gradient_and_second_backward_is_refused():
    inputs = case()
    with torch.no_grad():
        assert not fused(inputs).total.requires_grad
    total = fused(inputs).total
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        total.backward()


def test_half_a_markov_head_is_refused():
    inputs = case()
    inputs["w2_VR"] = None
    with pytest.raises(ValueError, match="both m_XR and w2_VR"):
        fused(inputs)


def test_plan_groups_rows_by_target_and_respects_the_chunk():
    index_X = torch.tensor([5, 3, 5, -1, 0, 3, 5, 9])
    plan = RowPlan.of(index_X, index_X != 9)
    assert plan.targets_U.tolist() == [0, 3, 5]
    assert plan.order_X.tolist() == [4, 1, 5, 0, 2, 6]
    assert plan.counts.tolist() == [1, 2, 3]
    chunks = plan.chunks(rows=3, tile_rows=2)
    assert [(chunk.u0, chunk.u1, chunk.x0, chunk.x1) for chunk in chunks] == [(0, 2, 0, 3), (2, 3, 3, 6)]
    tiles = [(tile.u0, tile.u1, tile.x0, tile.x1) for chunk in chunks for tile in chunk.tiles]
    assert tiles == [(0, 1, 0, 1), (1, 2, 1, 3), (0, 1, 0, 3)]


def test_extreme_logits_stay_finite():
    inputs = case(seed=5, dtype=torch.float32)
    with torch.no_grad():
        inputs["h_XD"].mul_(200)
    losses = fused(inputs)
    assert all(torch.isfinite(value).all() for value in vars(losses).values())
    assert all(torch.isfinite(gradient).all() for gradient in gradients(losses.total, inputs))
