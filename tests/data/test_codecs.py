"""State codecs against a float64 reference: every bit for bf16, every value's bound for the quantised ones."""

import numpy as np
import pytest
import torch

from deepspec.data.codecs import CODECS, CodecError, Lossless, Quantised, codec_named, codec_numbered

QUANTISED = [codec for codec in CODECS.values() if isinstance(codec, Quantised)]


def hidden_states(rows: int, channels: int, seed: int = 0) -> torch.Tensor:
    """Like real ones: channels of very different scale, offsets, a massive first token, heavy tails."""
    generator = torch.Generator().manual_seed(seed)
    states_SF = torch.randn(rows, channels, generator=generator)
    scale_F = torch.exp2(torch.randn(channels, generator=generator) * 2)
    offset_F = torch.randn(channels, generator=generator) * scale_F * 2
    states_SF = states_SF * scale_F + offset_F
    states_SF[:1, : max(1, channels // 16)] *= 500
    tails_SF = torch.rand(rows, channels, generator=generator) < 0.002
    return torch.where(tails_SF, states_SF * 40, states_SF).to(torch.bfloat16)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int16), b.view(torch.int16))


def every_bfloat16() -> torch.Tensor:
    return torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (1, 7), (3, 5), (257, 33), (9000, 64)])
def test_lossless_returns_every_bit(shape):
    states_SF = hidden_states(*shape)
    codec = Lossless()
    assert same_bits(codec.decode(memoryview(codec.encode(states_SF)), *shape), states_SF)


def test_lossless_keeps_all_65536_patterns_nan_inf_and_denormals():
    states_SF = every_bfloat16()
    for order in (states_SF, states_SF.T.contiguous(), states_SF[:, torch.randperm(256)]):
        assert same_bits(Lossless().decode(memoryview(Lossless().encode(order)), 256, 256), order)


def test_lossless_takes_views_that_are_not_contiguous():
    wide_SF = hidden_states(40, 64)
    part_SF = wide_SF[3:30, 5:50]
    assert same_bits(Lossless().decode(memoryview(Lossless().encode(part_SF)), 27, 45), part_SF.contiguous())


@pytest.mark.parametrize("codec", QUANTISED, ids=lambda codec: codec.name)
@pytest.mark.parametrize("shape", [(1, 4), (2, 9), (50, 33), (400, 96)])
def test_quantised_error_is_bounded_by_the_channels_own_spread(codec, shape):
    states_SF = hidden_states(*shape)
    decoded_SF = codec.decode(memoryview(codec.encode(states_SF)), *shape).double().numpy()
    exact_SF = states_SF.double().numpy()
    seen_SF = exact_SF[:: -(-shape[0] // 64)]
    # numpy's median of an even number is the middle of two values, torch's is the lower one: allow either
    median_F = np.sort(seen_SF, 0)[(len(seen_SF) - 1) // 2]
    deviation_SF = np.abs(seen_SF - median_F)
    spread_F = np.maximum(np.sort(deviation_SF, 0)[(len(seen_SF) - 1) // 2] / 0.6745, deviation_SF.mean(0) / 4)
    step_F = 2**0.125 * np.maximum(codec.delta * spread_F, np.abs(median_F) / 256)
    bound_SF = 0.5001 * step_F + np.abs(exact_SF) * 2**-7 + 2.0**-32
    assert (np.abs(decoded_SF - exact_SF) <= bound_SF).all()


@pytest.mark.parametrize(("name", "limit"), [("int8", 0.02), ("int4", 0.17)])
def test_quantised_error_relative_to_each_channels_deviation(name, limit):
    states_SF = hidden_states(600, 128)[1:]
    codec = codec_named(name)
    error_SF = codec.decode(memoryview(codec.encode(states_SF)), *states_SF.shape).double() - states_SF.double()
    relative_F = error_SF.square().mean(0).sqrt() / states_SF.double().std(0)
    assert relative_F.max() < limit
    assert relative_F.mean() > limit / 20  # it is a lossy codec: an accidental identity would be a bug too


@pytest.mark.parametrize("codec", QUANTISED, ids=lambda codec: codec.name)
def test_quantised_keeps_nan_inf_and_far_outliers_exactly(codec):
    states_SF = hidden_states(100, 16)
    states_SF[5, 3], states_SF[6, 3], states_SF[7, 3] = float("nan"), float("inf"), float("-inf")
    states_SF[8, 3] = 3e38
    decoded_SF = codec.decode(memoryview(codec.encode(states_SF)), 100, 16)
    assert same_bits(decoded_SF[5:9, 3:4].contiguous(), states_SF[5:9, 3:4].contiguous())
    assert decoded_SF.isfinite().sum() == 100 * 16 - 3


@pytest.mark.parametrize("codec", QUANTISED, ids=lambda codec: codec.name)
@pytest.mark.parametrize("value", [0.0, 1e-38, -3.0, 3e38, float("nan")])
def test_quantised_constant_channels(codec, value):
    states_SF = torch.full((10, 3), value, dtype=torch.bfloat16)
    decoded_SF = codec.decode(memoryview(codec.encode(states_SF)), 10, 3)
    torch.testing.assert_close(decoded_SF, states_SF, rtol=0.01, atol=2.0**-32, equal_nan=True)


def test_sizes_on_states_like_real_ones():
    states_SF = hidden_states(1000, 256)
    sizes = {name: len(codec.encode(states_SF)) / states_SF.numel() for name, codec in CODECS.items()}
    assert sizes["bf16"] < 1.45
    assert sizes["int8"] < 0.95
    assert sizes["int4"] < 0.56


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_damaged_blocks_are_named(codec):
    block = codec.encode(hidden_states(20, 16))
    with pytest.raises(CodecError, match="damaged block"):
        codec.decode(memoryview(block[: len(block) // 2]), 20, 16)
    with pytest.raises(CodecError, match="damaged block"):
        codec.decode(memoryview(block), 21, 16)


def test_wrong_input_and_unknown_codecs_are_named():
    with pytest.raises(CodecError, match="float32"):
        Lossless().encode(torch.zeros(2, 2))
    with pytest.raises(CodecError, match=r"int16.*bf16, int8, int4"):
        codec_named("int16")
    with pytest.raises(CodecError, match=r"99.*update"):
        codec_numbered(99)
