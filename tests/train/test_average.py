"""The moving average against its definition."""

import torch
from torch import nn

from deepspec.train.average import Average


def test_the_average_follows_its_recurrence_and_swaps_back():
    module = nn.Linear(3, 2)
    average = Average(module, 0.5)
    expected = module.weight.detach().double().clone()
    for update in range(30):
        with torch.no_grad():
            module.weight.add_(torch.randn(2, 3, generator=torch.Generator().manual_seed(update)))
        average.update()
        decay = min(0.5, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay) * module.weight.detach().double()
    torch.testing.assert_close(average.tensors["weight"].double(), expected, rtol=1e-5, atol=1e-6)
    kept = module.weight.detach().clone()
    with average.swapped():
        torch.testing.assert_close(module.weight.detach(), average.tensors["weight"])
    assert torch.equal(module.weight, kept)


def test_a_restored_average_goes_on():
    module = nn.Linear(3, 2, dtype=torch.bfloat16)
    first, second = Average(module, 0.9), Average(module, 0.9)
    for _ in range(3):
        first.update()
    second.restore(first.tensors, first.updates)
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)
    assert second.tensors["weight"].dtype == torch.float32
    assert second.updates == 3
