"""The family table: lookup, taps, windows."""

import pytest

from deepspec.models import families
from tests.tiny import tiny_config


@pytest.mark.parametrize(
    ("layers", "taps"),
    [
        (36, (1, 9, 17, 25, 33)),  # Qwen3-4B and 8B
        (40, (1, 10, 19, 28, 37)),  # Qwen3-14B
        (30, (1, 8, 14, 21, 27)),  # SmolLM2-135M: halves round up
        (4, (0, 1, 2)),
        (2, (0,)),
    ],
)
def test_default_taps(layers, taps):
    assert families.default_taps(layers) == taps
    assert families.validate_taps(taps, layers) == taps


def test_default_taps_of_other_counts_are_ascending_and_allowed():
    for layers in range(2, 60):
        for count in (1, 3, 5, 8):
            taps = families.default_taps(layers, count)
            assert families.validate_taps(taps, layers) == taps
            assert len(taps) == min(count, layers - 1)


@pytest.mark.parametrize("taps", [[], [3, 2], [1, 1], [-2, 0], [0, 3]])
def test_bad_taps_are_refused(taps):
    with pytest.raises(families.TapError, match="strictly ascending"):
        families.validate_taps(taps, 4)


def test_embedding_is_a_tap_and_the_last_layer_is_not():
    assert families.validate_taps([-1, 2], 4) == (-1, 2)
    with pytest.raises(families.TapError, match="last layer"):
        families.validate_taps([3], 4)


@pytest.mark.parametrize(
    ("name", "family", "windows"),
    [
        ("qwen3", "qwen3", (None,) * 4),
        ("qwen3_moe", "qwen3_moe", (None,) * 4),
        ("llama_rope3", "llama", (None,) * 4),
        ("qwen2", "qwen2", (None,) * 4),
        ("mistral", "mistral", (6,) * 4),
        ("gemma3", "gemma3", (6, None, 6, None)),
        ("gemma4", "gemma4", (6, None, 6, None)),
    ],
)
def test_family_and_windows(name, family, windows):
    config = tiny_config(name)
    assert families.family_of(config).name == family
    assert families.layer_windows(config) == windows


def test_multimodal_wrapper_is_its_text_family():
    from transformers import Gemma3Config

    wrapper = Gemma3Config(text_config=tiny_config("gemma3").to_dict())
    assert families.family_of(wrapper).name == "gemma3"
    assert families.text_config(wrapper).hidden_size == 32


def test_unknown_family_names_the_known_ones():
    from transformers import GPT2Config

    with pytest.raises(families.UnknownFamilyError, match=r"gpt2.*qwen3"):
        families.family_of(GPT2Config())


def test_scale_and_cap():
    assert families.embed_scale(tiny_config("gemma3")) == 32**0.5
    assert families.embed_scale(tiny_config("qwen3")) == 1.0
    assert families.softcap(tiny_config("gemma4")) == 20.0
    assert families.softcap(tiny_config("llama")) is None
