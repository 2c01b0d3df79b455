"""Tiny random targets of every family: 4 layers, width 32, 97 tokens, float32. No hub, no files."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from deepspec.models.target import Target

VOCAB = 97
FAMILIES = ("qwen3", "qwen3_moe", "llama", "llama_rope3", "qwen2", "mistral", "gemma3", "gemma4")

_COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    initializer_range=0.2,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
)
_MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_GEMMA = dict(sliding_window=6, layer_types=_MIXED, tie_word_embeddings=True)
_ROPE3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_FAMILY: dict[str, dict] = {
    "qwen3": dict(model_type="qwen3", tie_word_embeddings=True),
    "qwen3_moe": dict(
        model_type="qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
    "llama": dict(model_type="llama", tie_word_embeddings=True),
    "llama_rope3": dict(model_type="llama", tie_word_embeddings=False, rope_parameters=_ROPE3),
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=True),
    "mistral": dict(model_type="mistral", tie_word_embeddings=False, sliding_window=6),
    "gemma3": dict(model_type="gemma3_text", final_logit_softcapping=None, query_pre_attn_scalar=8, **_GEMMA),
    "gemma4": dict(
        model_type="gemma4_text",
        final_logit_softcapping=20.0,
        global_head_dim=16,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCAB,
        **_GEMMA,
    ),
}


def tiny_config(family: str = "qwen3", **overrides) -> PretrainedConfig:
    """The configuration of a tiny model of ``family`` (one of FAMILIES)."""
    fields = {**_COMMON, **_FAMILY[family], **overrides}
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def tiny_model(family: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides):
    """A random causal LM; the global generator is left as it was. Norm weights are randomised too, so that a wrong
    norm shows."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides), dtype=dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval().requires_grad_(False)


def tiny_target(
    family: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32, taps=None, **overrides
) -> Target:
    """A ``Target`` around ``tiny_model``; default taps of four layers are 0, 1, 2."""
    return Target.from_model(tiny_model(family, seed, dtype, **overrides), taps=taps, name=f"tiny-{family}")
