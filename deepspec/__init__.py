"""DeepSpec: train, evaluate and export draft models for speculative decoding.

Vocabulary: the *target* p is served; the *drafter* q proposes a *block* of γ tokens after an *anchor* (the last
committed token), reading the target's *taps* (hidden states after chosen decoder layers) over the *context*; one
*verification* by the target commits the accepted prefix and one token of its own, which ends a *round*.
Acceptance length τ = tokens committed per round, in [1, γ+1].

Shape suffixes, used on tensors of two or more dimensions:
    B rows of a batch      S tokens of a (packed) sequence   T new tokens of a call      N anchors of a row
    G block size γ         M tapped layers                   D hidden size               F = M·D concatenated taps
    V vocabulary           R Markov rank                     L rows with a last state    C head dim
    H query heads          K key-value heads
"""

__version__ = "0.1.0"
