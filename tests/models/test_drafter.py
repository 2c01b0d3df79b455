"""Building, saving and loading: equal outputs after a round trip, published checkpoints unchanged, clear refusals."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepspec.models import drafter as drafters
from deepspec.models.confidence_scale import ConfidenceScale
from deepspec.models.decode import generate
from deepspec.models.draft_config import derive_mask_token
from deepspec.models.drafter_config import DrafterConfig, DrafterConfigError
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.sampling import Sampling
from tests.models.drafting import TAPS, WIDTH, batch, drafter, forced_proposal, frozen_head, logits, samples, shake
from tests.tiny import FAMILIES, VOCAB, tiny_config, tiny_target

DRAFT_IDS = [token for token in range(VOCAB) if token % 3 != 1]
KINDS = {
    "dspark": dict(),
    "gated": dict(markov_head="gated"),
    "rnn": dict(markov_head="rnn", confidence_with_markov=False),
    "dflash": dict(kind="dflash"),
    "confidence alone": dict(markov_rank=0),
    "window": dict(sliding_window=6),
    "gemma3 window": dict(family="gemma3", sliding_window=6),
    "gemma4": dict(family="gemma4", sliding_window=6),
    "gemma4 keys are values": dict(family="gemma4", config_overrides=dict(attention_k_eq_v=True)),
    "llama3 rope": dict(family="llama_rope3"),
    "learned mask, own embedding": dict(learned_mask=True, own_embedding=True),
    "reduced": dict(draft_ids=DRAFT_IDS),
    "eagle3": dict(kind="eagle3"),
    "eagle3 reduced": dict(kind="eagle3", draft_ids=DRAFT_IDS, qk_norm=False, ttt_length=3),
    "eagle3 gemma4": dict(kind="eagle3", family="gemma4"),
}


def hidden(model):
    with torch.no_grad():
        out = model.training_forward(batch(block_size=model.block_size))
        if model.config.kind == "eagle3":
            return logits(model, out.hidden_IBSD)
        return logits(model, out.hidden_BNGD, out.markov_BNGR)


@pytest.mark.parametrize("name", KINDS)
def test_save_load_gives_the_same_drafter(name, tmp_path):
    model = drafter(**KINDS[name])
    model.confidence_scale = ConfidenceScale((1.5, 1.0, 0.5, 2.0), (0.0, 0.1, -0.2, 0.3))
    facts = dict(target_name="tiny", target_fingerprint="f" * 64, thinking=False, provenance={"steps": 3})
    drafters.save(model, tmp_path, dtype=torch.float32, **facts)
    again = drafters.load(tmp_path, model.head)
    assert again.config == DrafterConfig(**{**vars(model.config), "mask_token_id": again.config.mask_token_id})
    assert again.taps == TAPS
    assert again.confidence_scale == model.confidence_scale
    assert not again.training
    assert again.metadata["target"] == {"name": "tiny", "fingerprint": "f" * 64}
    assert again.metadata["provenance"]["steps"] == 3
    assert torch.equal(hidden(again), hidden(model))
    stored = load_file(tmp_path / "model.safetensors")
    assert ("embed_tokens.weight" in stored) == model.config.own_embedding
    assert ("lm_head.weight" in stored) == (model.config.draft_vocab_size is not None)


def test_saving_again_keeps_the_facts(tmp_path):
    model = drafter()
    facts = {"target_name": "tiny", "target_path": "org/tiny", "target_revision": "v1", "thinking": True}
    drafters.save(model, tmp_path, dtype=torch.float32, **facts)
    drafters.update_metadata(tmp_path, temperatures=[1.0, 2.0, 3.0, 4.0])  # as format 1 stored it: no shifts
    again = drafters.load(tmp_path, model.head)
    assert again.confidence_scale == ConfidenceScale((1.0, 2.0, 3.0, 4.0))
    drafters.save(again, tmp_path / "copy")
    fields = drafters.read_config(tmp_path / "copy")
    assert fields["dtype"] == "bfloat16"
    assert fields["deepspec"]["thinking"] is True
    assert fields["deepspec"]["target"] == {"name": "tiny", "path": "org/tiny", "revision": "v1"}
    assert fields["deepspec"]["temperatures"] == [1.0, 2.0, 3.0, 4.0]
    again.confidence_scale = None
    drafters.save(again, tmp_path / "copy")
    assert drafters.load(tmp_path / "copy", model.head).confidence_scale is None
    for wrong in ([1.0, 2.0], [1.0, 2.0, 0.0, 1.0]):
        drafters.update_metadata(tmp_path, temperatures=wrong)
        with pytest.raises(drafters.CheckpointError, match=r"config\.json: .*calibrate again"):
            drafters.load(tmp_path, model.head)
    assert all(t.dtype == torch.bfloat16 for t in load_file(tmp_path / "copy" / "model.safetensors").values())


def test_a_relative_target_folder_cannot_be_taken_for_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "x").mkdir(parents=True)
    given = {"models/x": "./models/x", "./models/x": "./models/x", "org/x": "org/x", str(tmp_path): str(tmp_path)}
    for path, recorded in given.items():
        drafters.save(drafter(), tmp_path / "d", target_path=path)
        assert drafters.read_config(tmp_path / "d")["deepspec"]["target"]["path"] == recorded


def test_head_in_the_folder_replaces_the_target(tmp_path):
    model = drafter(family="gemma4")
    drafters.save(model, tmp_path, include_head=True, dtype=torch.float32)
    alone = drafters.load(tmp_path)
    assert torch.equal(hidden(alone), hidden(model))
    assert alone.head.softcap == 20.0
    drafters.save(model, tmp_path / "bare", dtype=torch.float32)
    with pytest.raises(drafters.CheckpointError, match="pass the target"):
        drafters.load(tmp_path / "bare")


def test_state_replaces_the_weights(tmp_path):
    model = drafter()
    averaged = {name: tensor * 0.5 for name, tensor in model.state_dict().items()}
    drafters.save(model, tmp_path, state=averaged, dtype=torch.float32)
    again = drafters.load(tmp_path, model.head)
    assert torch.equal(again.backbone.fc.weight, model.backbone.fc.weight * 0.5)


# --- the published layout, written by hand -------------------------------------------------------------------------

PUBLISHED = dict(
    architectures=["Qwen3DSparkModel"],
    model_type="qwen3",
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    hidden_act="silu",
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    attention_bias=False,
    attention_dropout=0.0,
    num_target_layers=4,
    layer_types=["full_attention", "full_attention"],
    tie_word_embeddings=False,
    block_size=4,
    mask_token_id=5,
    target_layer_ids=[0, 1, 2],
    num_anchors=512,
    markov_rank=6,
    markov_head_type="vanilla",
    enable_confidence_head=True,
    confidence_head_with_markov=True,
)


def published(folder, head, drop=(), extra=(), **changes):
    """A checkpoint as deepseek-ai/DeepSpec releases them: names and shapes of its public checkpoints."""
    shapes = {"fc.weight": (WIDTH, 3 * WIDTH), "hidden_norm.weight": (WIDTH,), "norm.weight": (WIDTH,)}
    for i in range(2):
        at = f"layers.{i}."
        shapes |= {at + f"self_attn.{n}_proj.weight": (w, WIDTH) for n, w in (("q", 32), ("k", 16), ("v", 16))}
        shapes |= {at + "self_attn.o_proj.weight": (WIDTH, 32)}
        shapes |= {at + f"self_attn.{n}_norm.weight": (8,) for n in "qk"}
        shapes |= {at + f"{n}_layernorm.weight": (WIDTH,) for n in ("input", "post_attention")}
        shapes |= {at + f"mlp.{n}_proj.weight": (48, WIDTH) for n in ("gate", "up")}
        shapes |= {at + "mlp.down_proj.weight": (WIDTH, 48)}
    if changes.get("markov_rank", 6):
        shapes |= {f"markov_head.markov_w{i}.weight": (VOCAB, 6) for i in (1, 2)}
        shapes |= {"confidence_head.proj.weight": (1, WIDTH + 6), "confidence_head.proj.bias": (1,)}
    shapes |= dict(extra)
    generator = torch.Generator().manual_seed(8)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() * 0.3 for name, shape in shapes.items()}
    tensors |= {"embed_tokens.weight": head.embed_VD.bfloat16(), "lm_head.weight": head.head_VD.bfloat16()}
    folder.mkdir(exist_ok=True)
    save_file({k: v for k, v in tensors.items() if k not in drop}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**PUBLISHED, **changes}))
    return tensors


def test_published_checkpoints_load_unchanged(tmp_path):
    head = frozen_head()
    tensors = published(tmp_path / "full", head)
    published(tmp_path / "bare", head, drop=("embed_tokens.weight", "lm_head.weight"))
    alone, shared = drafters.load(tmp_path / "full"), drafters.load(tmp_path / "bare", head)
    assert alone.config.kind == "dspark"
    assert alone.config.mask_token_id == 5
    assert torch.equal(alone.head.embed_VD, tensors["embed_tokens.weight"].float())
    weight = tensors["layers.1.self_attn.k_proj.weight"].float()
    assert torch.equal(shared.backbone.layers[1].self_attn.k_proj.weight, weight)
    sample = samples()[0]
    for model in (alone, shared):
        state = model.start(1, 32)
        state.add(1)
        model.extend(state, sample.tokens_S[None, :10], sample.taps_SF[None, :9], [9])
        _, proposal = forced_proposal(model, state, sample.tokens_S[9:10], sample.tokens_S[10:])
        assert proposal.confidence_BG.shape == (1, 4)
    # drafts of the file's own weights, redone with the published formulas on the drafter's hidden states
    b = batch(block_size=4)
    out = shared.training_forward(b)
    previous = b.tokens_BS.gather(1, (b.anchors_BN.clamp(min=0)[..., None] + torch.arange(4)).flatten(1).clamp(max=25))
    bias = tensors["markov_head.markov_w1.weight"].float()[previous] @ tensors["markov_head.markov_w2.weight"].float().T
    expected = out.hidden_BNGD @ head.head_VD.T + bias.view(3, 4, 4, VOCAB)
    torch.testing.assert_close(logits(shared, out.hidden_BNGD, out.markov_BNGR), expected)


def test_published_dflash_is_the_same_class_without_heads(tmp_path):
    head = frozen_head()
    published(tmp_path, head, markov_rank=0, enable_confidence_head=False)
    model = drafters.load(tmp_path, head)
    assert model.config.kind == "dflash"
    assert model.markov_head is None
    assert model.confidence_head is None


def test_saved_folder_has_the_published_fields_and_names(tmp_path):
    head = frozen_head()
    tensors = published(tmp_path / "theirs", head)
    drafters.save(drafters.load(tmp_path / "theirs", head), tmp_path / "ours", include_head=True)
    ours = json.loads((tmp_path / "ours" / "config.json").read_text())
    skipped = {"rope_theta", "rope_scaling"}  # newer transformers write rope_parameters
    assert {k: ours[k] for k in PUBLISHED if k not in skipped} == {
        k: v for k, v in PUBLISHED.items() if k not in skipped
    }
    assert ours["rope_parameters"]["rope_theta"] == 10000.0
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)


REFUSALS = {
    "z-lab": (dict(architectures=["DFlashDraftModel"]), drafters.CheckpointError, "sample_from_anchor is absent"),
    "unknown": (dict(architectures=["MedusaModel"]), drafters.CheckpointError, "no drafter layout that is known"),
    "anchor": (dict(sample_from_anchor=False), drafters.AnchorLayoutError, "sample_from_anchor is False"),
    "head": (dict(markov_head_type="lstm"), drafters.CheckpointError, "markov_head='lstm' is unknown"),
    "version": (dict(deepspec={"format_version": 9}), drafters.CheckpointError, "format_version 9 is newer"),
    "width": (dict(hidden_size=64), drafters.WrongTargetError, "hidden_size is 64, the target's head has 32"),
    "vocabulary": (dict(vocab_size=99), drafters.WrongTargetError, "vocab_size is 99"),
    "block size": (dict(block_size=None), drafters.CheckpointError, "no block_size"),
    "shape": (dict(intermediate_size=40), drafters.CheckpointError, "mlp.*has shape"),
    "missing d2t": (dict(draft_vocab_size=10), drafters.CheckpointError, "no tensor d2t"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name, tmp_path):
    changes, error, message = REFUSALS[name]
    published(tmp_path, frozen_head(), **changes)
    with pytest.raises(error, match=message):
        drafters.load(tmp_path, frozen_head())


def test_refused_tensors(tmp_path):
    published(tmp_path / "missing", frozen_head(), drop=("layers.1.mlp.up_proj.weight",))
    with pytest.raises(drafters.CheckpointError, match=r"lacks layers\.1\.mlp\.up_proj\.weight"):
        drafters.load(tmp_path / "missing", frozen_head())
    published(tmp_path / "more", frozen_head(), extra={"layers.2.mlp.up_proj.weight": (48, WIDTH)})
    with pytest.raises(drafters.CheckpointError, match=r"holds layers\.2\.mlp\.up_proj\.weight"):
        drafters.load(tmp_path / "more", frozen_head())
    published(tmp_path / "other", frozen_head())
    with pytest.raises(drafters.WrongTargetError, match="belongs to another"):
        drafters.load(tmp_path / "other", frozen_head(seed=99))
    (tmp_path / "other" / "model.safetensors").write_bytes(b"damaged file")
    with pytest.raises(drafters.CheckpointError, match="damaged"):
        drafters.load(tmp_path / "other", frozen_head())
    with pytest.raises(drafters.CheckpointError, match="does not exist"):
        drafters.load(tmp_path / "nowhere", frozen_head())


def test_fingerprint_of_the_target(tmp_path):
    target = tiny_target("qwen3", taps=TAPS)
    head = FrozenHead.of(target)
    cfg = DrafterConfig(layers=1, block_size=4, markov_rank=6)
    model = drafters.build(cfg, target.config, head, target.taps)
    drafters.save(model, tmp_path, target_name=target.name, target_fingerprint=target.fingerprint)
    loaded = drafters.load(tmp_path, target)
    assert loaded.dtype == target.dtype
    with pytest.raises(drafters.WrongTargetError, match="trained for target tiny-qwen3"):
        drafters.load(tmp_path, tiny_target("qwen3", seed=1, taps=TAPS))


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("options", [dict(markov_rank=6), dict(kind="dflash"), dict(kind="eagle3")])
def test_decoding_with_a_built_drafter_is_greedy_decoding(options, batch_size):
    target = tiny_target("llama_rope3", taps=TAPS)
    model = drafters.build(DrafterConfig(block_size=4, **options), target.config, FrozenHead.of(target), target.taps)
    shake(model.eval())
    prompts = [[5, 9, 33], [70, 2, 4, 8, 15, 16], [90], [12, 13]]
    wanted = dict(max_new_tokens=12, stop_ids=[], batch_size=batch_size)
    plain = {row.index: row.tokens for row in generate(target, prompts, **wanted)}
    drafted = list(generate(target, prompts, drafter=model, **wanted))
    assert {row.index: row.tokens for row in drafted} == plain
    assert all(each.proposed for row in drafted for each in row.rounds[:1])


# --- building ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dspark", "dflash", "eagle3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_build_for_every_family(family, kind):
    head = frozen_head(family)
    model = drafters.build(DrafterConfig(kind=kind, block_size=4), tiny_config(family), head, TAPS)
    assert len(list(model.parameters())) > 5
    sample = samples()[0]
    state = model.start(2, 32)
    state.add(2)
    model.extend(state, sample.tokens_S[:10].expand(2, -1), sample.taps_SF[:9].expand(2, -1, -1), [9, 4])
    proposal = model.propose(state, sample.tokens_S[[9, 4]], Sampling(temperature=1.0), torch.rand(2, 4), 4)
    assert proposal.tokens_BG.shape == (2, 4)


def test_build_depends_on_the_seed_alone():
    def first(seed):
        model = drafters.build(DrafterConfig(block_size=4), tiny_config(), frozen_head(), TAPS, seed=seed)
        return model.backbone.fc.weight

    before = torch.random.get_rng_state()
    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_rope_scaling_is_inherited():
    scaled = tiny_config("llama_rope3")
    model = drafters.build(DrafterConfig(block_size=4), scaled, frozen_head(), TAPS)
    assert model.hf_config.rope_parameters == scaled.rope_parameters
    plain = drafters.build(DrafterConfig(block_size=4), tiny_config("llama"), frozen_head(), TAPS)
    positions = torch.tensor([[100]])
    like = torch.zeros(1)
    assert not torch.allclose(model.backbone.rotary(like, positions)[0], plain.backbone.rotary(like, positions)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(mask_token_id=97), "mask_token_id=97 is outside"),
        (dict(draft_vocab_size=98), "draft_vocab_size=98"),
        (dict(draft_vocab_size=5), "none draft_ids"),
    ],
)
def test_options_that_do_not_fit_the_target(options, message):
    ids = list(range(98)) if options.get("draft_vocab_size") == 98 else None
    with pytest.raises(DrafterConfigError, match=message):
        drafters.build(DrafterConfig(**options), tiny_config(), frozen_head(), TAPS, draft_ids=ids)


@pytest.mark.parametrize("ids", [[3, 2], [1, 1], [-1, 4], [3, 97]])
def test_draft_ids_must_be_ascending_ids(ids):
    with pytest.raises(DrafterConfigError, match="strictly ascending"):
        drafters.build(DrafterConfig(draft_vocab_size=2), tiny_config(), frozen_head(), TAPS, draft_ids=ids)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (dict(kind="dflash", markov_rank=8), ("markov_rank=8", "kind=dflash")),
        (dict(kind="dflash", confidence=True), ("confidence=true", "kind=dflash")),
        (dict(kind="eagle3", layers=2), ("layers=2", "kind=eagle3")),
        (dict(kind="eagle3", sliding_window=8), ("sliding_window=8", "kind=eagle3")),
        (dict(markov_rank=0, confidence=False), ("markov_rank=0", "confidence=false")),
        (dict(confidence=False, confidence_with_markov=True), ("confidence_with_markov=true", "confidence=false")),
        (dict(sliding_window=3, block_size=4), ("sliding_window=3", "block_size=4")),
        (dict(qk_norm=False), ("qk_norm=false", "kind=dspark")),
    ],
)
def test_contradictions_name_both_options(options, names):
    with pytest.raises(DrafterConfigError) as caught:
        DrafterConfig(**options)
    assert all(name in str(caught.value) for name in names)


@pytest.mark.parametrize(
    "options", [dict(kind="medusa"), dict(markov_head="lstm"), dict(block_size=0), dict(layers=-1)]
)
def test_options_out_of_range(options):
    with pytest.raises(DrafterConfigError, match=next(iter(options))):
        DrafterConfig(**options)


def test_mask_token_means_nothing_in_text():
    qwen = tiny_config("qwen3", vocab_size=151936)
    assert derive_mask_token(qwen, 151936) == 151669
    assert derive_mask_token(tiny_config("gemma4"), VOCAB) == 4
    small = tiny_config("llama", bos_token_id=1, eos_token_id=2, pad_token_id=2)
    assert derive_mask_token(small, VOCAB) == 0
    many = tiny_config("llama", bos_token_id=0, eos_token_id=[1, 3], pad_token_id=2)
    assert derive_mask_token(many, VOCAB) == 4
