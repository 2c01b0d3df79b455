"""The target's states of conversations: for the cache, and in the training process. Knows no files.

Shapes: B rows, T tokens of the longest, S tokens of one conversation, I of them with a last state, F tap channels.
"""

from collections.abc import Sequence

import torch

from deepspec.data.batch import Sample
from deepspec.data.cache import CAPTURE_SEMANTICS, SHAPE_KEYS, Origin, Probe
from deepspec.data.capture_plan import Conversation
from deepspec.data.fingerprints import head_fingerprint, template_fingerprint
from deepspec.data.record import Row, last_positions, supervised_mask
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.target import Target

PROBE_STATES = 16


def origin_of(
    target: Target, *, codec: str, thinking: bool, revision: str | None = None, log_normaliser: bool = False
) -> Origin:
    """What a cache made with this target states about itself."""
    return Origin(
        target={
            "name": target.name,
            "path": target.path,
            "revision": revision,
            "fingerprint": target.fingerprint,
            "head": head_fingerprint(target.head_VD),
            "shape": {key: getattr(target.config, key, None) for key in SHAPE_KEYS},
        },
        taps=list(target.taps),
        thinking=thinking,
        template=template_fingerprint(target.tokenizer),
        codec=codec,
        log_normaliser=log_normaliser,
        semantics=CAPTURE_SEMANTICS,
    )


@torch.inference_mode()
def capture(target: Target, conversations: Sequence[Conversation], *, log_normaliser: bool = False) -> list[Row]:
    """One forward over a batch; states in bfloat16 on the target's device, in the order given.

    ``log_normaliser`` adds the log-normaliser and the most likely token of p at every last state.

    Padded on the right; the target ignores padding, so a row's states do not depend on its neighbours beyond the
    rounding of the matrix products.
    """
    width = max(len(conversation) for conversation in conversations)
    tokens_BT = torch.zeros(len(conversations), width, dtype=torch.int64)
    for row, conversation in enumerate(conversations):
        tokens_BT[row, : len(conversation)] = torch.tensor(conversation.tokens)
    lengths = [len(conversation) for conversation in conversations]
    states = target(tokens_BT.to(target.device), lengths_B=lengths)
    assert states.taps_BTF is not None
    lasts = []
    for row, conversation in enumerate(conversations):
        at_I = last_positions(supervised_mask(len(conversation), conversation.spans)).to(target.device)
        lasts.append(states.last_BTD[row, at_I].to(torch.bfloat16))
    known: list[tuple[torch.Tensor | None, torch.Tensor | None]] = [(None, None)] * len(lasts)
    if log_normaliser:
        sizes = [len(last_ID) for last_ID in lasts]
        log_z, top = FrozenHead.of(target).log_normaliser(torch.cat(lasts))
        known = list(zip(log_z.split(sizes), top.split(sizes), strict=True))
    rows = []
    for row, (conversation, last_ID, (log_z_I, top_I)) in enumerate(zip(conversations, lasts, known, strict=True)):
        rows.append(
            Row(
                id=conversation.id,
                source=conversation.source,
                tokens=conversation.tokens,
                spans=conversation.spans,
                taps_SF=states.taps_BTF[row, : len(conversation)].to(torch.bfloat16),
                last_ID=last_ID,
                log_z_I=log_z_I,
                top_I=top_I,
            )
        )
    return rows


def to_sample(row: Row) -> Sample:
    """The Sample that the lossless cache would return for a captured row."""
    return Sample(
        id=row.id,
        tokens_S=torch.tensor(row.tokens, dtype=torch.int64),
        supervised_S=supervised_mask(len(row.tokens), row.spans),
        taps_SF=row.taps_SF.cpu(),
        last_ID=row.last_ID.cpu(),
    )


@torch.inference_mode()
def probe(target: Target, row: Row) -> Probe:
    """The target's own next tokens at up to PROBE_STATES evenly spaced last states of a row.

    From the model's own forward over the row's tokens, not from the captured states, which they are to prove.
    """
    count = len(row.last_ID)
    states = sorted({index * count // PROBE_STATES for index in range(PROBE_STATES)})
    at_P = last_positions(supervised_mask(len(row.tokens), row.spans))[states].to(target.device)
    tokens_1S = torch.tensor([row.tokens[: int(at_P.max()) + 1]], device=target.device)
    logits_1PV = target.model(input_ids=tokens_1S, use_cache=False, logits_to_keep=at_P).logits
    return Probe(row.id, states, logits_1PV[0].argmax(-1).tolist())
