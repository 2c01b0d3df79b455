"""Copies: of evaluation prompts (shared word runs) and of earlier prompts (exact, near). Knows text only."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepspec.data.sources import SUFFIXES, RowError, SourceError, conversation, infer, local_files, read_file

Frame = tuple[tuple[str, ...], tuple[str, ...]]
FRAME_TEXTS = 8  # prompts from which on it is no chance that all of them begin or end alike


def words(text: str) -> list[str]:
    """Lower-case letters-and-digits words, so that punctuation and white space do not hide a copy."""
    return re.findall(r"\w+", text.lower())


def _hash(parts: Iterable[str]) -> int:
    """64-bit hash that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(" ".join(parts).encode("utf-8", "replace"), digest_size=8).digest())


def _runs(found: list[str], length: int) -> Iterable[str]:
    return (" ".join(found[start : start + length]) for start in range(len(found) - length + 1))


def frame_of(texts: Sequence[Sequence[str]]) -> Frame:
    """Words that all texts begin and end with: what a benchmark asks around its questions ("reason step by step …")."""
    if len(texts) < FRAME_TEXTS:
        return (), ()
    first = min(texts, key=len)
    start = 0
    while start < len(first) and all(text[start] == first[start] for text in texts):
        start += 1
    end = 0
    while end < len(first) - start and all(text[-1 - end] == first[-1 - end] for text in texts):
        end += 1
    return tuple(first[:start]), tuple(first[len(first) - end :])


def without(frame: Frame, found: list[str]) -> list[str]:
    """Words without a frame that they stand in; unchanged where they do not, or are nothing else."""
    before, after = frame
    inside = found[len(before) : len(found) - len(after)]
    framed = tuple(found[: len(before)]) == before and tuple(found[len(found) - len(after) :]) == after
    return inside if framed and inside else found


class Evaluation:
    """The prompts of evaluation sets, indexed by runs of ``ngram`` words (shorter prompts as a whole).

    What all prompts of a file have around them is left out, there and where it is looked up: a short question would
    be hidden in it, and a run that holds it would match questions that have nothing in common.
    """

    def __init__(self, paths: Iterable[str], ngram: int) -> None:
        self.ngram = ngram
        self.prompts = 0
        self._frames: list[Frame] = []
        self._runs: dict[str, str] = {}
        self._whole: dict[str, str] = {}
        for path in paths:
            files = local_files(path)
            if not files:
                raise SourceError(f"prompts.decontaminate: no {', '.join(SUFFIXES)} file in '{path}'")
            for file in files:
                self._add_file(file)

    def _add_file(self, file: Path) -> None:
        columns, texts = None, []
        for row in read_file(file):
            columns = columns or infer(row, {}, file.stem)
            try:
                turns = conversation(row, columns)
            except RowError as error:
                raise SourceError(f"prompts.decontaminate: a row of {file} is not a prompt ({error})") from error
            for turn in turns:
                if turn["role"] == "user":
                    texts.append(turn["content"])
        frame = frame_of([words(text) for text in texts])
        if any(frame) and frame not in self._frames:
            self._frames.append(frame)
        for text in texts:
            self.add(text, file.name, frame)

    def add(self, text: str, origin: str, frame: Frame = ((), ())) -> None:
        """Index one evaluation prompt."""
        self.prompts += 1
        found = without(frame, words(text))
        if len(found) < self.ngram:
            self._whole.setdefault(" ".join(found), f"{origin}: {text[:200]}")
        for run in _runs(found, self.ngram):
            self._runs.setdefault(run, f"{origin}: {text[:200]}")

    def match(self, text: str) -> str | None:
        """The evaluation prompt that ``text`` shares a run of words with, or None."""
        found = words(text)
        for inside in (found, *(without(frame, found) for frame in self._frames)):
            if len(inside) < self.ngram and (whole := self._whole.get(" ".join(inside))) is not None:
                return whole
        return next((self._runs[run] for run in _runs(found, self.ngram) if run in self._runs), None)


class Copies:
    """Prompts seen so far. Exact copies after lower-casing and white-space folding; near copies by MinHash.

    Near copies: 64 minima of hashed word 5-grams in 16 bands of 4; a candidate that shares a band is a copy when the
    share of equal minima, an estimate of the Jaccard similarity with standard error below 0.06, reaches ``similarity``.
    Memory: 24 bytes a prompt for exact copies, about 1.5 kB more for near ones.
    """

    PERMUTATIONS, BANDS = 64, 16

    def __init__(self, similarity: float) -> None:
        self.similarity = similarity
        self._exact: set[int] = set()
        self._bands: list[dict[bytes, list[int]]] = [{} for _ in range(self.BANDS)]
        self._minima: list[Any] = []
        generator = np.random.default_rng(0)
        self._factors = generator.integers(1, 2**63, self.PERMUTATIONS, dtype=np.uint64) | np.uint64(1)
        self._shifts = generator.integers(0, 2**63, self.PERMUTATIONS, dtype=np.uint64)

    def seen(self, text: str) -> str | None:
        """Reason when ``text`` is a copy of an earlier text (``exact copy`` or ``near copy``); else remember it."""
        key = _hash(text.lower().split())
        if key in self._exact:
            return "exact copy"
        self._exact.add(key)
        if not self.similarity:
            return None
        minima = self._signature(text)
        bands = [minima[start :: self.BANDS].tobytes() for start in range(self.BANDS)]
        candidates = {index for table, band in zip(self._bands, bands, strict=True) for index in table.get(band, ())}
        if any((self._minima[index] == minima).mean() >= self.similarity for index in candidates):
            return "near copy"
        for table, band in zip(self._bands, bands, strict=True):
            table.setdefault(band, []).append(len(self._minima))
        self._minima.append(minima)
        return None

    def _signature(self, text: str) -> Any:
        found = words(text)
        grams = {_hash(found[start : start + 5]) for start in range(max(1, len(found) - 4))}
        hashes_N = np.fromiter(grams, dtype=np.uint64, count=len(grams))
        # Multiply-shift hashing: wrap-around modulo 2**64, then the high bits, which are the well-mixed ones.
        return ((hashes_N[:, None] * self._factors + self._shifts) >> np.uint64(32)).min(axis=0).astype(np.uint32)
