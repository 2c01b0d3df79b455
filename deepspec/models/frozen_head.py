"""The target's embedding and head without the target: what a drafter borrows. Read straight from safetensors or GGUF.
A plain object, so that no module, optimizer or DeepSpeed engine ever owns the tensors.

Letters: V vocabulary, D hidden size.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspec.models import families
from deepspec.models.stored_weights import StoredWeights, StoredWeightsError

if TYPE_CHECKING:
    from deepspec.models.target import Target

PREFIXES = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
_EMBED_NAMES = tuple(f"{prefix}embed_tokens.weight" for prefix in PREFIXES)
_HEAD_NAMES = tuple(f"{prefix}lm_head.weight" for prefix in PREFIXES)
NORMALISER_ROWS = 512  # rows of logits over the whole vocabulary held at a time
_GGUF_EMBED, _GGUF_HEAD = "token_embd.weight", "output.weight"


class FrozenHeadError(ValueError):
    """A checkpoint without the embedding or the head where they are expected."""


class FrozenHead:
    """``embed_VD`` and ``head_VD`` (the same tensor when tied), frozen; no norm: it takes post-norm states."""

    def __init__(
        self, embed_VD: Tensor, head_VD: Tensor | None = None, *, embed_scale: float = 1.0, softcap: float | None = None
    ) -> None:
        self.embed_VD = embed_VD.detach()
        self.head_VD = self.embed_VD if head_VD is None else head_VD.detach()
        self.softcap = softcap
        # Kept as it is and rounded where it is used: a head that was read in bfloat16 and moved to float32 must have
        # the scale of a float32 model.
        self._exact_embed_scale = embed_scale

    @classmethod
    def of(cls, target: "Target") -> "FrozenHead":
        """Sharing the memory of a loaded target."""
        embed_VD = target.embedding.weight
        assert isinstance(embed_VD, Tensor)
        tied = embed_VD.data_ptr() == target.head_VD.data_ptr()
        scale = families.embed_scale(target.config)
        return cls(embed_VD, None if tied else target.head_VD, embed_scale=scale, softcap=target.softcap)

    @classmethod
    def load(
        cls,
        path: str,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        revision: str | None = None,
    ) -> "FrozenHead":
        """Read two tensors (one when tied) of a folder or hub id: only the shards that hold them are opened."""
        from transformers import AutoConfig

        from deepspec.models.target import gguf_file

        gguf = gguf_file(path)
        config = AutoConfig.from_pretrained(path, revision=revision, **({"gguf_file": gguf} if gguf else {}))
        embed, head = _read_gguf(Path(path) / gguf) if gguf else _read_safetensors(path, revision)
        tied = getattr(config, "tie_word_embeddings", families.text_config(config).tie_word_embeddings)
        if head is None and not tied:
            raise FrozenHeadError(
                f"{path} has no lm_head.weight although tie_word_embeddings is false in its config.json"
            )
        kwargs: dict[str, Any] = {"embed_scale": families.embed_scale(config), "softcap": families.softcap(config)}
        return cls(embed, None if tied else head, **kwargs).to(device, dtype)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "FrozenHead":
        """A copy on another device or in another dtype; tied stays tied, nothing is copied if nothing changes."""
        dtype = dtype or self.embed_VD.dtype
        embed = self.embed_VD.to(device=device, dtype=dtype)
        head = None if self.tied else self.head_VD.to(device=device, dtype=dtype)
        return FrozenHead(embed, head, embed_scale=self._exact_embed_scale, softcap=self.softcap)

    @property
    def embed_scale(self) -> float:
        """Factor of the embeddings, rounded to the weights' dtype as models do: √3072 = 55.43, 55.5 in bfloat16."""
        return float(torch.tensor(self._exact_embed_scale).to(self.embed_VD.dtype))

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one tensor."""
        return self.head_VD is self.embed_VD

    @property
    def vocab_size(self) -> int:
        """V, padding of the vocabulary included."""
        return self.head_VD.shape[0]

    @property
    def hidden_size(self) -> int:
        """D."""
        return self.head_VD.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return self.head_VD.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head_VD.device

    def embed(self, tokens: Tensor) -> Tensor:
        """Scaled embeddings [..., D] as the target's decoder receives them."""
        embedded = F.embedding(tokens, self.embed_VD)
        return embedded if self.embed_scale == 1.0 else embedded * self.embed_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of post-norm states [..., D], in their dtype, soft cap applied. Gradients flow through."""
        return cap_logits(F.linear(hidden, self.head_VD), self.softcap)

    def full_logits(self, hidden: Tensor) -> Tensor:
        """``logits`` in float32, not rounded to the weights' dtype on the way where the device can do that."""
        return cap_logits(matmul_fp32(hidden, self.head_VD), self.softcap)

    @torch.no_grad()
    def log_normaliser(self, hidden_ND: Tensor) -> tuple[Tensor, Tensor]:
        """(log Σ_v exp(logit_v) in float32, most likely token) of post-norm states, [N] each.

        The logits are not rounded to the weights' dtype, and held for some rows at a time.
        """
        log_z_N = torch.empty(len(hidden_ND), dtype=torch.float32, device=hidden_ND.device)
        top_N = torch.empty(len(hidden_ND), dtype=torch.int64, device=hidden_ND.device)
        for start in range(0, len(hidden_ND), NORMALISER_ROWS):
            part_ND = hidden_ND[start : start + NORMALISER_ROWS]
            if part_ND.device.type == "cuda":
                logits_NV = matmul_fp32(part_ND.to(self.dtype), self.head_VD)
            else:
                logits_NV = part_ND.float() @ self.head_VD.float().T
            logits_NV = cap_logits(logits_NV, self.softcap)
            log_z_N[start : start + len(part_ND)] = logits_NV.logsumexp(-1)
            top_N[start : start + len(part_ND)] = logits_NV.argmax(-1)
        return log_z_N, top_N


def matmul_fp32(hidden: Tensor, head_VD: Tensor) -> Tensor:
    """hidden @ headᵀ in float32. In half precision on CUDA the product itself is (without gradients, which that kernel
    lacks): rounded first, logits of 16 to 32 would stand on a grid of 0.125 and tie."""
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16) and not torch.is_grad_enabled():
        flat = torch.mm(hidden.reshape(-1, hidden.shape[-1]), head_VD.T, torch.float32)
        return flat.view(*hidden.shape[:-1], -1)
    return F.linear(hidden, head_VD).float()


def cap_logits(logits: Tensor, softcap: float | None) -> Tensor:
    """s·tanh(logits/s), or the logits where there is no cap."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _read_safetensors(path: str, revision: str | None) -> tuple[Tensor, Tensor | None]:
    try:
        stored = StoredWeights(path, revision)
    except StoredWeightsError as error:
        raise FrozenHeadError(f"{error}, or one with a GGUF file") from error
    embed = stored.first(_EMBED_NAMES)
    if embed is None:
        raise FrozenHeadError(f"{path} has no embedding under any of {', '.join(_EMBED_NAMES)}")
    return embed, stored.first(_HEAD_NAMES)


def _read_gguf(path: Path) -> tuple[Tensor, Tensor | None]:
    import gguf

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    def read(name: str) -> Tensor | None:
        if name not in tensors:
            return None
        return torch.from_numpy(gguf.dequantize(tensors[name].data, tensors[name].tensor_type).copy())

    embed = read(_GGUF_EMBED)
    if embed is None:
        raise FrozenHeadError(f"{path} has no tensor {_GGUF_EMBED}")
    return embed, read(_GGUF_HEAD)
