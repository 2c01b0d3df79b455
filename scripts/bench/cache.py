"""The target cache against raw memory-mapped bfloat16, on real states: sizes, errors, speeds, waits, in one run.

    python scripts/bench/cache.py target=smollm2-135m data=demo [--tokens 20000] [--output FILE]

needs the responses of `python -m deepspec.data regenerate` for the same options. Run it on an idle machine, with one
thread (OMP_NUM_THREADS=1) for speeds per core. Caches are made in a temporary folder and removed.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deepspec import recipes
from deepspec.data import record
from deepspec.data.batch import Sample, collate
from deepspec.data.cache import DECODED
from deepspec.data.cache_build import Plan, build_cache
from deepspec.data.cache_reader import CacheReader
from deepspec.data.cache_writer import finalise, write_shard
from deepspec.data.capture import capture, with_normalisers
from deepspec.data.capture_plan import Responses, batches, encode_rows
from deepspec.data.codecs import CODECS, codec_named
from deepspec.data.config import DataPipelineConfig
from deepspec.data.loader import CacheSource, DataConfig, Loader
from deepspec.models.drafter import build
from deepspec.models.drafter_config import DrafterConfig
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.target import Target
from deepspec.train.objectives import LossWeights, denominators, objective

BARS = {"bf16": 0.69, "int8": 0.43, "int4": 0.24}
SPEED_BAR, BUILD_BAR, PADDING_BAR, WAIT_BAR = 400.0, 0.90, 0.05, 0.02
MASS_BAR = 0.001
REPEATS = 5


def main() -> int:
    """Measure, print, write JSON; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20000, help="tokens of real chat data to use (default 20000)")
    parser.add_argument("--steps", type=int, default=6, help="training steps for the loader's wait (default 6)")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options, overrides = parser.parse_known_args()
    cfg = recipes.load("data", overrides, DataPipelineConfig)
    target = Target.load(cfg.target)
    with tempfile.TemporaryDirectory() as folder:
        results: dict[str, Any] = {"threads": torch.get_num_threads(), "target": target.name}
        cfg.cache.limit = rows_for(cfg, target, options.tokens)
        results |= measure_build(cfg, target, Path(folder))
        exact = CacheReader(Path(folder) / "bf16")
        head = FrozenHead.of(target)
        readers = {"bf16": exact}
        for name in CODECS:
            if name != "bf16":
                readers[name] = reencode(exact, name, Path(folder) / name, head)
        results |= measure_sizes(readers) | measure_speed(readers, Path(folder)) | measure_access(readers)
        if cfg.cache.log_normaliser:
            results["mass"] = {name: measure_mass(reader, head) for name, reader in readers.items()}
        results["wait"] = {
            name: measure_wait(reader, target, options.steps) for name, reader in readers.items() if name != "int4"
        }
    failed = show(results)
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n")
    return 1 if failed else 0


def rows_for(cfg: DataPipelineConfig, target: Target, tokens: int) -> int:
    """How many responses make ``tokens`` tokens."""
    responses = Responses(cfg.responses_dir)
    settings = Plan.of(cfg.cache, responses, cfg.target.thinking).settings
    total = 0
    for row in range(len(responses)):
        found, _ = encode_rows(target.tokenizer, responses.rows(row, row + 1), settings)
        total += sum(len(conversation) for conversation in found)
        if total >= tokens:
            return row + 1
    print(f"only {total} tokens in {cfg.responses_dir}; {tokens} were asked for", file=sys.stderr)
    return len(responses)


def measure_build(cfg: DataPipelineConfig, target: Target, folder: Path) -> dict[str, Any]:
    """Tokens per second of the build and of the bare forward over the same batches.

    The forward makes log-normalisers where the recipe asks for them (`cache.log_normaliser=false` leaves them out).
    """
    responses = Responses(cfg.responses_dir, cfg.cache.limit)
    plan = Plan.of(cfg.cache, responses, cfg.target.thinking)
    found, _ = encode_rows(target.tokenizer, responses.rows(0, len(responses)), plan.settings)
    groups = []
    for start in range(0, len(found), cfg.cache.shard_rows):
        shard = found[start : start + cfg.cache.shard_rows]
        chosen = batches([len(row) for row in shard], cfg.cache.batch_tokens, cfg.cache.max_padding)
        groups += [[shard[index] for index in group] for group in chosen]
    tokens = sum(len(row) for row in found)
    padded = sum(max(len(row) for row in group) * len(group) for group in groups)
    codec = codec_named("bf16") if cfg.cache.log_normaliser else None
    capture(target, groups[-1], normalisers_for=codec)
    started = time.perf_counter()
    for group in groups:
        capture(target, group, normalisers_for=codec)
    bare = time.perf_counter() - started
    own = replace(cfg, cache=replace(cfg.cache, codec="bf16", folder=str(folder / "bf16")))
    started = time.perf_counter()
    build_cache(own, target)
    built = time.perf_counter() - started
    return {
        "build": {
            "tokens": tokens,
            "bare_tokens_per_second": tokens / bare,
            "build_tokens_per_second": tokens / built,
            "ratio": bare / built,
            "padding": 1 - tokens / padded,
        }
    }


def reencode(exact: CacheReader, codec: str, folder: Path, head: FrozenHead) -> CacheReader:
    """The same samples under another codec, with log-normalisers of what that codec decodes, if they have any."""
    folder.mkdir()
    with_z = exact.manifest.origin.log_normaliser
    states = DECODED if with_z and not codec_named(codec).lossless else ""
    origin = replace(exact.manifest.origin, codec=codec, normaliser_states=states)
    with write_shard(folder, 0, origin, "bench") as writer:
        for number in range(len(exact)):
            stored, sample = record.head(exact.record(number)), exact.sample(number)
            row = record.Row(
                id=sample.id,
                source="",
                tokens=stored.tokens_S.tolist(),
                spans=stored.spans,
                taps_SF=sample.taps_SF,
                last_ID=sample.last_ID,
            )
            if with_z:
                (row,) = with_normalisers([row], head, codec_named(codec))
            writer.add("", record.pack(row, codec_named(codec), len(origin.taps)))
    finalise(folder, 1, origin, {})
    return CacheReader(folder)


def measure_mass(reader: CacheReader, head: FrozenHead, most: int = 2000) -> dict[str, float]:
    """Σ_v p(v) = Σ_v exp(logit_v − log Z) with the stored log Z and the decoded states; it should be 1."""
    masses: list[torch.Tensor] = []
    states = 0
    for number in range(len(reader)):
        sample = reader.sample(number)
        logits_IV = head.logits(sample.last_ID.to(head.device, head.dtype)).double()
        masses.append((logits_IV - sample.log_z_I.to(logits_IV)[:, None]).exp().sum(-1).cpu())
        states += len(sample.last_ID)
        if states >= most:
            break
    mass = torch.cat(masses)
    return {
        "states": states,
        "mean": float(mass.mean()),
        "std": float(mass.std()),
        "min": float(mass.min()),
        "max": float(mass.max()),
    }


def measure_sizes(readers: dict[str, CacheReader]) -> dict[str, Any]:
    """Bytes relative to m+1 raw states of every token; error of each channel relative to its standard deviation."""
    sizes, errors = {}, {}
    exact = readers["bf16"]
    hidden = exact.manifest.target["shape"]["hidden_size"]
    raw = 2 * hidden * (len(exact.manifest.taps) + 1) * exact.manifest.tokens
    everything_SF = torch.cat([exact.sample(row).taps_SF for row in range(len(exact))]).float()
    deviation_F = everything_SF.std(0)
    for name, reader in readers.items():
        sizes[name] = reader.manifest.bytes / raw
        decoded_SF = torch.cat([reader.sample(row).taps_SF for row in range(len(reader))]).float()
        error_F = (decoded_SF - everything_SF).square().mean(0).sqrt() / deviation_F
        errors[name] = {"mean": float(error_F.mean()), "max": float(error_F.max())}
    return {
        "size": sizes,
        "error": errors,
        "raw_bytes": raw,
        "supervised": float(exact.states.sum() / exact.tokens.sum()),
    }


class RawMap:
    """The baseline: one memory-mapped file of raw bfloat16, taps and last states of the same samples."""

    def __init__(self, reader: CacheReader, path: Path) -> None:
        self.samples = [reader.sample(row) for row in range(len(reader))]
        with path.open("wb") as stream:
            for sample in self.samples:
                for states in (sample.taps_SF, sample.last_ID):
                    stream.write(states.view(torch.int16).numpy().tobytes())
        self._map = torch.from_numpy(np.memmap(path, dtype=np.int16, mode="c")).view(torch.bfloat16)
        sizes = [(sample.taps_SF.numel(), sample.last_ID.numel()) for sample in self.samples]
        self._starts = np.concatenate([[0], np.cumsum([sum(size) for size in sizes])])
        self._sizes = sizes
        for sample in self.samples:
            sample.taps_SF, sample.last_ID = sample.taps_SF[:0], sample.last_ID[:0]

    def sample(self, row: int) -> Sample:
        """Views into the map."""
        own, start, (taps, last) = self.samples[row], int(self._starts[row]), self._sizes[row]
        channels, hidden = own.taps_SF.shape[1], own.last_ID.shape[1]
        return Sample(
            own.id,
            own.tokens_S,
            own.supervised_S,
            self._map[start : start + taps].view(-1, channels),
            self._map[start + taps : start + taps + last].view(-1, hidden),
        )


def measure_speed(readers: dict[str, CacheReader], folder: Path) -> dict[str, Any]:
    """MB of raw states per second, read from a warm page cache, decoded and collated; alternating between sources."""
    exact = readers["bf16"]
    sources: dict[str, Callable[[int], Sample]] = {"raw": RawMap(exact, folder / "raw").sample}
    sources |= {name: reader.sample for name, reader in readers.items()}
    hidden, taps = exact.manifest.target["shape"]["hidden_size"], len(exact.manifest.taps)
    megabytes = 2 * hidden * (taps * int(exact.tokens.sum()) + int(exact.states.sum())) / 1e6
    order = sorted(range(len(exact)), key=lambda row: exact.tokens[row])
    groups = [order[start : start + 8] for start in range(0, len(order), 8)]
    speed: dict[str, dict[str, list[float]]] = {name: {"decode": [], "decode + collate": []} for name in sources}
    for _ in range(REPEATS):
        for name, sample in sources.items():
            gc.collect()
            for kind, times in speed[name].items():
                started = time.perf_counter()
                for group in groups:
                    read(sample, group, collated=kind != "decode")
                times.append(megabytes / (time.perf_counter() - started))
    return {"speed": {name: {k: statistics.median(v) for k, v in kinds.items()} for name, kinds in speed.items()}}


def read(sample: Callable[[int], Sample], rows: Sequence[int], collated: bool) -> None:
    """One micro batch."""
    samples = [sample(row) for row in rows]
    if collated:
        collate(samples, anchors_per_sample=48, block_size=7, seed=0, epoch=0)


def measure_access(readers: dict[str, CacheReader]) -> dict[str, Any]:
    """Bytes read for random single rows, relative to the bytes of their records, and seconds per row."""
    rows = torch.randperm(len(readers["bf16"]), generator=torch.Generator().manual_seed(0)).tolist()[:50]
    found = {}
    for name, reader in readers.items():
        before, started = reader.bytes_read, time.perf_counter()
        for row in rows:
            reader.sample(row)
        seconds = (time.perf_counter() - started) / len(rows)
        records = sum(int(reader._where[2][row]) for row in rows)
        found[name] = {"bytes_per_record_byte": (reader.bytes_read - before) / records, "ms": 1000 * seconds}
    return {"access": found}


def measure_wait(reader: CacheReader, target: Target, steps: int) -> float:
    """Share of a training step of the demo's drafter (two layers, 48 anchors) that waits for the loader."""
    torch.manual_seed(0)
    head, config = FrozenHead.of(target), DrafterConfig(kind="dspark", layers=2)
    drafter, weights = build(config, target.config, head, target.taps), LossWeights()
    data = DataConfig(max_length=512, anchors=48, global_batch=8, heldout=0.0)
    loader = Loader(CacheSource(reader), data, block_size=drafter.block_size)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4)
    started, waited = time.perf_counter(), 0.0
    for number, step in enumerate(loader.batches(0, steps + 1)):
        batches = [batch.to(head.device, torch.float32) for batch in step]
        total = torch.stack([denominators(batch, drafter.config, weights) for batch in batches]).sum()
        for batch in batches:
            objective(drafter, batch, weights, total)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 0:  # the first step is warm-up: nothing could be read ahead of it
            started, waited = time.perf_counter(), loader.wait_seconds
    return (loader.wait_seconds - waited) / (time.perf_counter() - started)


def show(results: dict[str, Any]) -> int:
    """Print every figure beside its bar; returns how many bars are missed."""
    build, missed = results["build"], 0

    def line(text: str, good: bool | None) -> None:
        nonlocal missed
        missed += good is False
        print(f"  {text:<86}{'' if good is None else 'ok' if good else 'MISSED'}")

    print(f"{build['tokens']} tokens of {results['target']}, {results['supervised']:.0%} before a supervised token")
    for name, bar in BARS.items():
        size, error = results["size"][name], results["error"][name]
        text = f"{name:<5} size {size:.3f} of raw (bar {bar}); error/deviation of a channel: mean {error['mean']:.4f}"
        line(f"{text}, max {error['max']:.3f}", size <= bar)
    raw = results["speed"]["raw"]
    for name, speed in results["speed"].items():
        ratios = f"{speed['decode + collate'] / raw['decode + collate']:.2f} of raw"
        text = (
            f"{name:<5} decode {speed['decode']:.0f} MB/s, with collate {speed['decode + collate']:.0f} MB/s, {ratios}"
        )
        line(text, speed["decode + collate"] >= SPEED_BAR if name in ("bf16", "int8") else None)
    for name, mass in results.get("mass", {}).items():
        text = f"{name:<5} mass of p over {mass['states']} states: mean {mass['mean']:.5f}, std {mass['std']:.5f}"
        worst = max(abs(mass["min"] - 1), abs(mass["max"] - 1))
        line(f"{text}, {mass['min']:.4f} to {mass['max']:.4f} (bar ± {MASS_BAR})", worst <= MASS_BAR)
    for name, access in results["access"].items():
        ratio = access["bytes_per_record_byte"]
        line(
            f"{name:<5} random row: {access['ms']:.2f} ms, {ratio:.3f} bytes read per byte of its record", ratio == 1.0
        )
    for name, wait in results["wait"].items():
        line(f"{name:<5} loader wait {wait:.2%} of a training step (bar {WAIT_BAR:.0%})", wait < WAIT_BAR)
    text = f"build {build['build_tokens_per_second']:.0f} tokens/s, bare forward {build['bare_tokens_per_second']:.0f}"
    line(f"{text}: {build['ratio']:.2f} (bar {BUILD_BAR})", build["ratio"] >= BUILD_BAR)
    line(f"padding {build['padding']:.2%} (bar {PADDING_BAR:.0%})", build["padding"] < PADDING_BAR)
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
