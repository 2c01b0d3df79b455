"""Shared by the export tests: drafters of every kind on disk, their outputs, and a target for llama.cpp."""

import gguf
import numpy as np
import torch

from deepspec.models import drafter as drafters
from deepspec.models.export import checkpoint as folders
from deepspec.models.export import imports
from tests.models.drafting import batch, drafter, logits
from tests.tiny import VOCAB

DRAFT_IDS = [token for token in range(VOCAB) if token % 3 != 1]
KINDS = {
    "dspark": dict(),
    "gated": dict(markov_head="gated"),
    "rnn": dict(markov_head="rnn", confidence_with_markov=False),
    "confidence alone": dict(markov_rank=0),
    "dflash": dict(kind="dflash"),
    "reduced": dict(draft_ids=DRAFT_IDS),
    "eagle3": dict(kind="eagle3", qk_norm=False),
    "eagle3 reduced": dict(kind="eagle3", qk_norm=False, draft_ids=DRAFT_IDS),
    "eagle3 with qk norms": dict(kind="eagle3"),
}


def saved(folder, dtype=torch.bfloat16, **options):
    """A tiny drafter on disk as training saves it: (model, checkpoint)."""
    model = drafter(**options)
    drafters.save(model, folder, target_name="tiny", dtype=dtype)
    return model, imports.read(folder)


def speculators(source, kind="dspark", **changes):
    """``source`` as speculators writes it: nested layer config, aux ids k + 1, the verifier's copies beside it."""
    layer = {
        name: source.config[name] for name in ("num_hidden_layers", *folders.LAYER_FIELDS) if name in source.config
    }
    config = dict(
        architectures=["DSparkDraftModel"],
        speculators_model_type=kind,
        transformer_layer_config=layer | dict(model_type="qwen3", rope_parameters=source.config["rope_parameters"]),
        aux_hidden_state_layer_ids=[tap + 1 for tap in source.taps],
        draft_vocab_size=source.draft_vocab_size,
        sample_from_anchor=True,
        **{name: source.config[name] for name in imports._HEAD_FIELDS if name in source.config},
    )
    tensors = source.tensors | {"verifier_norm.weight": torch.ones(32), "mask_embedding": torch.zeros(32)}
    return folders.Checkpoint(config | changes, tensors)


def zlab(source, **changes):
    """``source`` as z-lab publishes DFlash; ``changes`` are of its dflash_config."""
    nested = dict(mask_token_id=source.config["mask_token_id"], target_layer_ids=list(source.taps))
    fields = {
        name: source.config[name]
        for name in (*("num_hidden_layers", *folders.LAYER_FIELDS), "rope_parameters")
        if name in source.config
    }
    config = fields | dict(
        architectures=["DFlashDraftModel"], model_type="qwen3", block_size=source.block_size, dflash_config=nested
    )
    nested |= changes
    return folders.Checkpoint(config, source.tensors)


def write_target_gguf(path, vocab=VOCAB):
    """The least of a target that an export reads: its tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(vocab)])
    writer.add_token_types([1] * vocab)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_tensor("token_embd.weight", np.zeros((vocab, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def outputs(model, made=None):
    """The drafter's logits of a training batch."""
    with torch.no_grad():
        out = model.training_forward(batch(made, block_size=model.block_size))
        if model.config.kind == "eagle3":
            return logits(model, out.hidden_IBSD)
        return logits(model, out.hidden_BNGD, out.markov_BNGR)
