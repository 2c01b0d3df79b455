"""A DSpark training step against an eager reference: time, memory, where the time goes, growth in S and N.

    python scripts/bench/train_step.py                 the bars: V 49 152 and 151 936, S 1024, N 128, γ 7, d 512, fp32
    python scripts/bench/train_step.py --quick         the same at toy sizes, a check that it runs
    python scripts/bench/train_step.py --table         seconds and memory over S and N
    python scripts/bench/train_step.py --loss          the fused loss alone on 3 584 rows
    python scripts/bench/train_step.py --profile       phases of a step, and attention by itself
    python scripts/bench/train_step.py --compile       the step with a compiled drafter
    python scripts/bench/train_step.py --recompute     the bars with `engine.recompute=true`

Each variant runs in its own process, one after another; run it on an idle machine. Memory is the high-water mark of
resident memory during steps, above that of the same process once weights, gradients, optimizer state and batch exist
(they are the same in all variants). Both variants start from the same weights, and their losses are compared.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deepspec.data.batch import DraftBatch, Sample, collate
from deepspec.files import write_json
from deepspec.models.attention import attend
from deepspec.models.block_drafter import BlockDrafter
from deepspec.models.draft_config import draft_config
from deepspec.models.drafter_config import DrafterConfig
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.masks import training_blocks
from deepspec.train.losses import Coefficients, LogitsHead, fused_loss
from deepspec.train.objectives import LossWeights, denominators, objective
from scripts.bench import reference_step as reference

MIB = 1 << 20
TAPS = (1, 9, 17, 25, 33)
THETA = 1_000_000.0


def parse() -> argparse.Namespace:
    """Command line; ``--worker`` is how the driver calls itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--block", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=1024, help="S, context tokens of the one row")
    parser.add_argument("--anchors", type=int, default=128)
    parser.add_argument("--rows", type=int, default=3584, help="rows of --loss")
    parser.add_argument("--steps", type=int, default=3, help="timed steps after one to warm up; the median counts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--manner", choices=sorted(reference.ATTENTION), default="eager", help="of the reference")
    parser.add_argument("--chunk-mib", type=int, help="memory of the fused loss's logits; default: its own")
    parser.add_argument("--output", help="JSON file for the numbers")
    for mode in ("quick", "table", "loss", "profile", "compile", "recompute"):
        parser.add_argument(f"--{mode}", action="store_true")
    parser.add_argument("--worker", choices=["fused", "reference", "loss"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.vocab, args.hidden, args.layers, args.rank, args.rows = [2048], 64, 2, 16, 256
        args.tokens, args.anchors, args.steps = 128, 16, 2
    return args


def chunk_bytes(args: argparse.Namespace) -> int | None:
    """What ``--chunk-mib`` asks of the fused loss."""
    return args.chunk_mib * MIB if args.chunk_mib else None


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (high-water mark) of this process in bytes."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def reset_high_water() -> None:
    """Set VmHWM back to VmRSS where the kernel allows it; otherwise the mark includes the set-up."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        print("the high-water mark could not be reset: memory includes the set-up", file=sys.stderr)


def make_drafter(args: argparse.Namespace) -> BlockDrafter:
    """Qwen3-4B's layer shape divided by five: 12 query and 3 key-value heads of 64 at width 512, MLP 3.75 wide."""
    from transformers import Qwen3Config

    heads = args.hidden // 512 * 12 or 4
    target = Qwen3Config(
        vocab_size=args.vocab[0],
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 15 // 4,
        num_hidden_layers=36,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        max_position_embeddings=32768,
        rms_norm_eps=reference.EPS,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    head = FrozenHead(torch.randn(args.vocab[0], args.hidden) * 0.05)
    cfg = DrafterConfig(layers=args.layers, block_size=args.block, markov_rank=args.rank, mask_token_id=1)
    return BlockDrafter(cfg, draft_config(cfg, target, TAPS, args.vocab[0]), head)


def make_batch(args: argparse.Namespace) -> DraftBatch:
    """One document; all but its first tenth is supervised."""
    generator = torch.Generator().manual_seed(1)
    supervised_S = torch.arange(args.tokens) >= args.tokens // 10
    sample = Sample(
        id="bench",
        tokens_S=torch.randint(args.vocab[0], (args.tokens,), generator=generator),
        supervised_S=supervised_S,
        taps_SF=torch.randn(args.tokens, len(TAPS) * args.hidden, generator=generator),
        last_ID=torch.randn(int(supervised_S[1:].sum()), args.hidden, generator=generator) * 4,
    )
    return collate([sample], anchors_per_sample=args.anchors, block_size=args.block, seed=0, epoch=0)


def shape_of(model: BlockDrafter) -> reference.Shape:
    """The reference's description of a drafter."""
    layer: Any = model.backbone.layers[0]
    attention = layer.self_attn
    sizes = (attention.heads, attention.kv_heads, attention.head_dim)
    return reference.Shape(len(model.backbone.layers), *sizes, THETA, model.block_size, model.mask_token_id)


def reference_weights(model: BlockDrafter) -> dict[str, torch.Tensor]:
    """The drafter's parameters under the reference's names."""
    prefixes = ("backbone.", "markov_head.", "confidence_head.")
    renamed = {}
    for name, value in model.named_parameters():
        prefix = next((p for p in prefixes if name.startswith(p)), "")
        renamed[name.removeprefix(prefix)] = value
    return renamed


Phases = dict[str, float]


def fused_step(model: BlockDrafter, batch: DraftBatch, chunk_bytes: int | None) -> Callable[[Phases], torch.Tensor]:
    """Forward, fused loss (which makes its gradients at once) and backward of our drafter."""
    weights = LossWeights()
    total = denominators(batch, model.config, weights)

    def step(phases: Phases) -> torch.Tensor:
        inner = model.training_forward

        def timed(made: DraftBatch):
            began = time.perf_counter()
            output = inner(made)
            phases["forward"] = time.perf_counter() - began
            return output

        model.training_forward = timed  # type: ignore[method-assign]
        began = time.perf_counter()
        loss, _ = objective(model, batch, weights, total, chunk_bytes=chunk_bytes)
        phases["head and loss"] = time.perf_counter() - began - phases["forward"]
        model.training_forward = inner  # type: ignore[method-assign]
        began = time.perf_counter()
        loss.backward()
        phases["backward"] = time.perf_counter() - began
        return loss.detach()

    return step


def reference_step(model: BlockDrafter, batch: DraftBatch, manner: str) -> Callable[[Phases], torch.Tensor]:
    """The same of the reference; its loss is differentiated down to the hidden states first, to be timed apart."""
    weights, shape, kernel = reference_weights(model), shape_of(model), reference.ATTENTION[manner]

    def step(phases: Phases) -> torch.Tensor:
        began = time.perf_counter()
        hidden = reference.backbone(weights, shape, model.head.embed_VD, batch, kernel)
        phases["forward"] = time.perf_counter() - began
        began = time.perf_counter()
        leaf = hidden.detach().requires_grad_()
        loss, _ = reference.loss_of(weights, shape, model.head.head_VD, leaf, batch, manner)
        loss.backward()
        value = loss.detach()
        del loss
        phases["head and loss"] = time.perf_counter() - began
        began = time.perf_counter()
        hidden.backward(leaf.grad)
        phases["backward"] = time.perf_counter() - began
        return value

    return step


def attention_seconds(args: argparse.Namespace, model: BlockDrafter, batch: DraftBatch) -> float:
    """Forward and backward of all layers' attention alone, on random states of the step's shapes."""
    shape, queries = shape_of(model), args.anchors * args.block

    def states(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(1, tokens, heads, shape.head_dim).requires_grad_()

    q, k, v = states(queries, shape.heads), *(states(args.tokens, shape.kv_heads) for _ in "kv")
    own_k, own_v = (states(queries, shape.kv_heads) for _ in "kv")
    blocks = training_blocks(batch.segments_BS, batch.anchors_BN, args.block)
    mask = reference.dense_mask(batch.segments_BS, batch.anchors_BN, args.block)
    kernel = reference.ATTENTION[args.manner]

    def once() -> None:
        if args.worker == "fused":
            out = attend(q, k.transpose(1, 2), v.transpose(1, 2), own_k, own_v, blocks, shape.head_dim**-0.5)
        else:
            out = kernel(q, torch.cat([k, own_k], 1), torch.cat([v, own_v], 1), mask)
        out.sum().backward()

    once()
    began = time.perf_counter()
    for _ in range(args.layers):
        once()
    return time.perf_counter() - began


def work_step(args: argparse.Namespace) -> dict[str, Any]:
    """One process: set up, one step to warm up, timed steps, memory above the set-up."""
    model, batch = make_drafter(args), make_batch(args)
    model.recompute = args.recompute
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    if args.compile:
        model.training_forward = torch.compile(model.training_forward)  # type: ignore[method-assign]
    if args.worker == "fused":
        step = fused_step(model, batch, chunk_bytes(args))
    else:
        step = reference_step(model, batch, args.manner)
    if args.compile:
        step({})
        optimizer.zero_grad(set_to_none=False)
    reset_high_water()
    baseline = resident("VmRSS")
    seconds: list[float] = []
    phases: list[Phases] = []
    first = 0.0
    for index in range(args.steps + 1):
        own: Phases = {}
        began = time.perf_counter()
        value = step(own)
        first = first or float(value)
        start_update = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        own["optimizer"] = time.perf_counter() - start_update
        if index:
            seconds.append(time.perf_counter() - began)
            phases.append(own)
    peak = resident("VmHWM")
    median = {name: statistics.median(p[name] for p in phases) for name in phases[0]}
    result = dict(loss=first, seconds=statistics.median(seconds), peak=peak - baseline, total=peak, phases=median)
    if args.profile:
        result["attention"] = attention_seconds(args, model, batch)
    return result


def work_loss(args: argparse.Namespace) -> dict[str, Any]:
    """The fused loss alone, forward and backward; targets as dense as those of N = S/8 anchors with γ = 7."""
    generator = torch.Generator().manual_seed(0)
    rows, vocab, positions = args.rows, args.vocab[-1], args.rows * 8 // 7
    h_XD = torch.randn(rows, args.hidden, generator=generator).requires_grad_()
    m_XR = torch.randn(rows, args.rank, generator=generator).requires_grad_()
    w2_VR = (torch.randn(vocab, args.rank, generator=generator) * 0.05).requires_grad_()
    head = LogitsHead(torch.randn(vocab, args.hidden, generator=generator) * 0.05)
    last_LD = torch.randn(positions, args.hidden, generator=generator) * 4
    index_X = torch.randint(positions, (rows,), generator=generator)
    labels_X = torch.randint(vocab, (rows,), generator=generator)
    weight_X = torch.full((rows,), 1.0 / rows)
    reset_high_water()
    baseline, began = resident("VmRSS"), time.perf_counter()
    coefficients = Coefficients(ce_X=0.1 * weight_X, tv_X=0.9 * weight_X)
    losses = fused_loss(
        h_XD, head, last_LD, index_X, labels_X, coefficients, m_XR=m_XR, w2_VR=w2_VR, chunk_bytes=chunk_bytes(args)
    )
    losses.total.backward()
    return dict(loss=losses.total.item(), seconds=time.perf_counter() - began, peak=resident("VmHWM") - baseline)


def spawn(args: argparse.Namespace, worker: str, **changes: Any) -> dict[str, Any]:
    """Run one variant in a fresh process and return what it measured."""
    options = vars(args) | changes
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", worker]
    for name in ("hidden", "layers", "rank", "block", "tokens", "anchors", "rows", "steps", "threads"):
        command += [f"--{name}", str(options[name])]
    command += ["--vocab", str(options["vocab"]), "--manner", args.manner]
    command += ["--chunk-mib", str(args.chunk_mib)] if args.chunk_mib else []
    command += [f"--{name}" for name in ("profile", "compile", "recompute") if options[name]]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return {"variant": worker, "vocab": options["vocab"], **json.loads(done.stdout.splitlines()[-1])}


def line(name: str, result: dict[str, Any]) -> str:
    """One result as a line of text."""
    return f"{name:24} {result['seconds']:9.3f} s/step {result['peak'] / MIB:10.0f} MiB   loss {result['loss']:.6f}"


def compare(args: argparse.Namespace, vocab: int) -> list[dict[str, Any]]:
    """Fused against reference at one vocabulary size."""
    print(f"V {vocab}, d {args.hidden}, S {args.tokens}, N {args.anchors}, γ {args.block}, {args.threads} threads")
    fused, plain = (spawn(args, worker, vocab=vocab) for worker in ("fused", "reference"))
    for result in (fused, plain):
        print(line(result["variant"], result), flush=True)
    if abs(fused["loss"] - plain["loss"]) > 1e-4 * abs(plain["loss"]):
        raise SystemExit("the two losses differ: one of the implementations is wrong, the ratios mean nothing")
    print(f"time 1/{plain['seconds'] / fused['seconds']:.2f}, memory 1/{plain['peak'] / fused['peak']:.2f}")
    if args.profile:
        names = [*fused["phases"], "attention"]
        for result in (fused, plain):
            parts = result["phases"] | {"attention": result["attention"]}
            print(f"{result['variant']:12}", "  ".join(f"{name} {parts[name]:.3f}" for name in names))
        print("(attention: all layers, forward and backward, alone; it is part of forward and backward)")
    print()
    return [fused, plain]


def table(args: argparse.Namespace, vocab: int) -> list[dict[str, Any]]:
    """The fused step over half, once and twice S and N."""
    found = []
    print(f"V {vocab}: seconds per step and MiB above the set-up")
    for tokens in (args.tokens // 2, args.tokens, args.tokens * 2):
        for anchors in (args.anchors // 2, args.anchors, args.anchors * 2):
            result = spawn(args, "fused", vocab=vocab, tokens=tokens, anchors=anchors)
            found.append(result | {"tokens": tokens, "anchors": anchors})
            print(line(f"S {tokens} N {anchors}", result), flush=True)
    return found


def main() -> None:
    """Drive the variants, or be one."""
    args = parse()
    if args.worker:
        torch.set_num_threads(args.threads)
        print(json.dumps(work_loss(args) if args.worker == "loss" else work_step(args)))
        return
    results: list[dict[str, Any]] = []
    if args.loss:
        results.append(spawn(args, "loss", vocab=args.vocab[-1]))
        print(line(f"loss, {args.rows} rows", results[0]))
    elif args.table:
        results = table(args, args.vocab[0])
    elif args.compile:
        results = [spawn(args, "fused", vocab=args.vocab[0], compile=compiled) for compiled in (False, True)]
        for name, result in zip(("eager drafter", "compiled drafter"), results, strict=True):
            print(line(name, result))
    else:
        results = [result for vocab in args.vocab for result in compare(args, vocab)]
    if args.output:
        write_json(args.output, results)


if __name__ == "__main__":
    main()
