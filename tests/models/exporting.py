"""Shared by the export tests: drafters of every kind on disk, their outputs, and a target for llama.cpp."""

import gguf
import numpy as np
import torch

from deepspec.models import drafter as drafters
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


def write_target_gguf(path):
    """The least of a target that an export reads: its tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_token_types([1] * VOCAB)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_tensor("token_embd.weight", np.zeros((VOCAB, 32), np.float32))
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
