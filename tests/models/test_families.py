"""The family table: lookup, taps, windows."""

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from deepspec.models import families
from tests.tiny import VOCAB, tiny_config, tiny_model, tiny_target


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


POSITIONS = 16  # the original length of the scaled ropes below
_SCALED = dict(rope_theta=10000.0, factor=4.0, original_max_position_embeddings=POSITIONS)
ROPES = {
    "default": dict(rope_type="default", rope_theta=10000.0),
    "linear": dict(rope_type="linear", **_SCALED),
    "yarn": dict(rope_type="yarn", **_SCALED),
    "llama3": dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, **_SCALED),
    "proportional": dict(rope_type="proportional", **_SCALED),
    "dynamic": dict(rope_type="dynamic", **_SCALED),
    "longrope": dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[1.0, 2.0, 4.0, 8.0], **_SCALED),
}


def rope_model(kind):
    length = POSITIONS if kind == "dynamic" else 64  # dynamic scales beyond max_position_embeddings
    return tiny_model("llama", rope_parameters=ROPES[kind], max_position_embeddings=length)


def longest_neighbour_matters(kind):
    """Whether transformers' own logits of a short text change when a long text stands beside it."""
    model = rope_model(kind)
    tokens_BT = torch.arange(2 * 40).reshape(2, 40) * 7 % VOCAB
    with torch.no_grad():
        alone = model(tokens_BT[:1, :10]).logits
        beside = model(tokens_BT).logits[:1, :10]
    return not torch.allclose(alone, beside, atol=1e-4)


@pytest.mark.parametrize("kind", ROPES)
def test_ropes_that_depend_on_the_batch_are_refused_and_no_others(kind):
    assert longest_neighbour_matters(kind) == (kind not in families.FIXED_ROPES)


def test_every_rope_of_transformers_is_decided():
    assert set(ROPES) == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_varying_rope_is_refused_with_the_remedy(kind):
    with pytest.raises(families.RopeError, match=rf"rope_type '{kind}'.*take a target with one of default, linear"):
        tiny_target("llama", rope_parameters=ROPES[kind])
    with pytest.raises(families.RopeError, match="of at most 512 tokens"):
        families.require_fixed_rope(tiny_config("llama", rope_parameters=ROPES["dynamic"]))


def test_a_varying_rope_of_one_type_of_layer_is_refused():
    per_layer = {"full_attention": ROPES["dynamic"], "sliding_attention": ROPES["default"]}
    config = tiny_config("gemma3", rope_parameters=per_layer)
    assert families.rope_types(config) == {"dynamic", "default"}
    with pytest.raises(families.RopeError, match="'dynamic'"):
        families.require_fixed_rope(config)


@pytest.mark.parametrize("kind", families.FIXED_ROPES)
def test_fixed_ropes_are_taken(kind):
    families.require_fixed_rope(tiny_config("llama", rope_parameters=ROPES[kind]))
