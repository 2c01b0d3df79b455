"""The target's states of conversations: for the cache, and in the training process. Knows no files.

Shapes: B rows, T tokens of the longest, S tokens of one conversation, I of them with a last state, F tap channels.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from deepspec.data.batch import Sample
from deepspec.data.cache import CAPTURE_SEMANTICS, DECODED, SHAPE_KEYS, Origin, Probe
from deepspec.data.capture_plan import Conversation
from deepspec.data.codecs import Codec, codec_named, encode_and_decode
from deepspec.data.fingerprints import head_fingerprint, template_fingerprint
from deepspec.data.record import Row, last_positions, supervised_mask
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.target import Target

PROBE_STATES = 16


def origin_of(
    target: Target, *, codec: str, thinking: bool, revision: str | None = None, log_normaliser: bool = False
) -> Origin:
    """What a cache made with this target states about itself."""
    lossy = not codec_named(codec).lossless
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
        normaliser_states=DECODED if log_normaliser and lossy else "",
        semantics=CAPTURE_SEMANTICS,
    )


@torch.inference_mode()
def capture(
    target: Target, conversations: Sequence[Conversation], *, normalisers_for: Codec | None = None
) -> list[Row]:
    """One forward over a batch; states in bfloat16 on the target's device, in the order given.

    ``normalisers_for`` adds the log-normaliser and the most likely token of p at every last state, as this codec
    stores it: they belong to the decoded states, not to those that are encoded.

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
    rows = []
    for row, (conversation, last_ID) in enumerate(zip(conversations, lasts, strict=True)):
        rows.append(
            Row(
                id=conversation.id,
                source=conversation.source,
                tokens=conversation.tokens,
                spans=conversation.spans,
                taps_SF=states.taps_BTF[row, : len(conversation)].to(torch.bfloat16),
                last_ID=last_ID,
            )
        )
    if normalisers_for is None:
        return rows
    return with_normalisers(rows, FrozenHead.of(target), normalisers_for)


@torch.inference_mode()
def with_normalisers(rows: Sequence[Row], head: FrozenHead, codec: Codec) -> list[Row]:
    """The rows with log-normaliser and most likely token of every last state that a reader of ``codec`` will decode."""
    blocks, decoded = [], []
    for row in rows:
        block, decoded_ID = encode_and_decode(codec, row.last_ID)
        blocks.append(block)
        decoded.append(decoded_ID)
    sizes = [len(decoded_ID) for decoded_ID in decoded]
    log_z, top = head.log_normaliser(torch.cat(decoded))
    return [
        replace(row, log_z_I=log_z_I, top_I=top_I, last_block=block)
        for row, block, log_z_I, top_I in zip(rows, blocks, log_z.split(sizes), top.split(sizes), strict=True)
    ]


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
