"""Learning rate as a pure function of the step: warm-up, then cosine or a plateau and a decay. Knows no optimizer."""

import math


def factor(
    step: int, total: int, *, schedule: str, warmup: float = 0.0, decay: float = 0.2, final: float = 0.0
) -> float:
    """Share of the peak learning rate for the 0-based optimizer ``step`` of ``total``.

    Warm-up is linear over the first round(warmup·total) steps and reaches 1 at its last step. "cosine" then falls to
    ``final`` as ½(1 + cos πx); "wsd" stays at 1 and falls linearly over the last round(decay·total) steps. x is
    measured so that the step after the last one would have the value ``final``: no step is wasted at zero.
    """
    warm = round(warmup * total)
    if step < warm:
        return (step + 1) / warm
    if schedule == "cosine":
        x = (step - warm) / max(total - warm, 1)
        shape = 0.5 * (1.0 + math.cos(math.pi * min(x, 1.0)))
    else:
        cool = min(max(round(decay * total), 1), total - warm)
        shape = min(1.0, (total - step) / max(cool, 1))
    return final + (1.0 - final) * max(shape, 0.0)
