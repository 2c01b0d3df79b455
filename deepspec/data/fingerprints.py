"""Short names for a target's head and for a tokenizer with its chat template, so that artefacts can be matched."""

import hashlib
import json
from typing import Any

import torch


def head_fingerprint(head_VD: torch.Tensor) -> str:
    """SHA-256 over a fixed sample of the head's weights in bfloat16: the same in any dtype and on any device."""
    rows = head_VD[:: max(1, head_VD.shape[0] // 64)]
    sample = rows[:, :: max(1, rows.shape[1] // 64)].detach().to("cpu", torch.bfloat16).contiguous()
    return hashlib.sha256(str(tuple(head_VD.shape)).encode() + sample.view(torch.int16).numpy().tobytes()).hexdigest()


def template_fingerprint(tokenizer: Any) -> str:
    """SHA-256 over vocabulary, added tokens and chat template."""
    digest = hashlib.sha256(str(getattr(tokenizer, "chat_template", None)).encode())
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    digest.update(json.dumps(vocabulary, ensure_ascii=False).encode())
    return digest.hexdigest()
