"""What a run will do, before it does it: the recipe as a table, and steps, tokens, memory and work as estimates."""

import dataclasses
import textwrap
from dataclasses import dataclass
from typing import Any

import torch

from deepspec.data.estimate import GPUS, human_bytes
from deepspec.train.losses import CPU_CHUNK_BYTES, DEVICE_CHUNK_BYTES
from deepspec.train.setup import Prepared

STEP_SHARE = 0.35  # of the peak that a training step is assumed to reach; the console's ETA is measured instead


@dataclass(frozen=True)
class Plan:
    """Estimates per rank and for the whole run."""

    parameters: int
    frozen: int
    steps: int
    tokens_per_step: float
    memory: int
    host: int
    flops_per_step: float

    def hours(self, device_flops: float, ranks: int) -> float:
        """Hours of the run on ``ranks`` devices that reach STEP_SHARE of ``device_flops``."""
        return self.steps * self.flops_per_step / (device_flops * STEP_SHARE * ranks) / 3600


def make(run: Prepared, ranks: int) -> Plan:
    """Estimate a run from shapes and sample lengths.

    Work per drafted position: forward and backward through the drafter (6 per weight) and through the frozen head
    (4 per weight, as it has no gradient); per supervised position one forward of the head for p; per context token the
    tap projection, keys and values. Attention itself is left out.
    """
    cfg, drafter, loader = run.cfg, run.drafter, run.loader
    parameters = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    head = drafter.head.head_VD.numel()
    lengths = loader.source.lengths()
    mean = sum(min(lengths[row], cfg.data.max_length) for row in loader.training_rows) / len(loader.training_rows)
    batch = min(cfg.data.global_batch, len(loader.training_rows))
    tokens, answer = mean * batch, mean * run.supervised
    context = _context_parameters(drafter)
    if cfg.drafter.kind == "eagle3":
        drafted, context = answer * batch * cfg.drafter.ttt_length, 0
    else:
        drafted = min(cfg.data.anchors, answer) * batch * cfg.drafter.block_size
    work = drafted * (6 * (parameters - context) + 4 * head) + 2 * head * answer * batch + 6 * context * tokens
    return Plan(
        parameters=parameters,
        frozen=head + (0 if drafter.head.tied else drafter.head.embed_VD.numel()),
        steps=run.total_steps,
        tokens_per_step=tokens,
        memory=_memory(run, parameters, ranks),
        host=int(_step_bytes(run, tokens) * (cfg.data.prefetch + 1)) // ranks,
        flops_per_step=work,
    )


def _context_parameters(drafter: Any) -> int:
    """Weights that see every context token: the tap projection, and keys and values of every layer."""
    names = ("fc", "k_proj", "v_proj")
    return sum(p.numel() for name, p in drafter.named_parameters() if any(part in names for part in name.split(".")))


def _memory(run: Prepared, parameters: int, ranks: int) -> int:
    """Bytes per rank: weights, fp32 gradients, masters and moments by ZeRO stage, head, states of a micro batch."""
    engine, drafter, width = run.cfg.engine, run.drafter, run.dtype.itemsize
    split = [ranks if engine.zero >= needed else 1 for needed in (1, 2, 3)]
    optimizer = 0 if engine.cpu_offload else parameters * 12 // split[0]
    model = parameters * width // split[2] + parameters * 4 // split[1] + optimizer
    head = drafter.head.head_VD.numel() * width * (1 if drafter.head.tied else 2)
    states = run.cfg.data.micro_tokens * width * ((len(drafter.taps) + 1) * drafter.hf_config.hidden_size)
    target = 0 if run.target is None else sum(p.numel() * p.element_size() for p in run.target.model.parameters())
    chunk = CPU_CHUNK_BYTES if run.device.type == "cpu" else DEVICE_CHUNK_BYTES
    return model + head + states + _activations(run) + target + chunk


def _step_bytes(run: Prepared, tokens: float) -> float:
    """Bytes of the states that a global step reads, in bfloat16: so many wait in (pinned) host memory."""
    source = run.loader.source
    return 2 * tokens * (source.features + run.supervised * source.hidden)


def _activations(run: Prepared) -> int:
    """Bytes that the draft layers keep for backward, for as many positions as a micro batch may draft.

    In each layer the inputs of every matmul and of the attention, and what the norms and the gate need of them: about
    8 times the hidden size, 4 times the queries and 4 times the MLP; with recompute one layer, and the others' inputs.
    """
    config, drafter = run.drafter.hf_config, run.cfg.drafter
    # not the config's head_dim: Gemma 4 has one for each kind of layer
    queries = next(part.out_features for name, part in run.drafter.named_modules() if name.endswith("q_proj"))
    layer = 8 * config.hidden_size + 4 * int(queries) + 4 * config.intermediate_size
    layers = drafter.ttt_length if drafter.kind == "eagle3" else config.num_hidden_layers
    values = layer + (layers - 1) * (config.hidden_size if run.cfg.engine.recompute else layer)
    return run.cfg.data.micro_tokens * run.dtype.itemsize * values


def table(run: Prepared, plan: Plan, ranks: int) -> str:
    """The recipe's values by group, then what follows from them and the data."""
    cfg, loader, device = run.cfg, run.loader, run.device
    lines = [f"{cfg.name} for {cfg.target.name} ({cfg.target.path}) → {cfg.folder}"]
    answers = () if cfg.data.prompts is None else ("regenerate",)
    for group in ("drafter", "data", *answers, "loss", "optim", "train", "engine"):
        values = dataclasses.asdict(getattr(cfg, group))
        shown = [f"{key}={_short(value)}" for key, value in values.items() if value is not None]
        lines += textwrap.wrap(
            "  ".join(shown), 118, initial_indent=f"  {group:<11}", subsequent_indent=" " * 13, break_on_hyphens=False
        )
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    lines += [
        f"  drafts     taps {list(run.taps)}, mask token {getattr(run.drafter.hf_config, 'mask_token_id', None)}; "
        f"{plan.parameters / 1e6:.1f} M trained and {plan.frozen / 1e6:.1f} M frozen parameters",
        f"  steps      {plan.steps} ({loader.steps_per_epoch} an epoch) of {plan.tokens_per_step:,.0f} tokens; "
        f"{len(loader.training_rows)} training and {len(loader.heldout_rows)} held-out samples",
        f"  on         {ranks} × {where}, {str(run.dtype).removeprefix('torch.')}; estimated "
        f"{human_bytes(plan.memory)} a rank, {plan.flops_per_step / 1e12:.2f} TFLOP a step{_hours(plan, where, ranks)}",
        f"  reads      {cfg.data.prefetch} steps ahead (data.prefetch): {human_bytes(plan.host)} of host memory a rank",
    ]
    return "\n".join(lines)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of the device as its vendor states it, or None where it is not known."""
    if device.type != "cuda":
        return None
    return _peak(torch.cuda.get_device_name(device))


def _peak(name: str) -> float | None:
    return next((peak * 1e12 for gpu, peak in GPUS.items() if gpu in name.replace("H200", "H100")), None)


def _hours(plan: Plan, name: str, ranks: int) -> str:
    peak = _peak(name)
    return "" if peak is None else f", {plan.hours(peak, ranks):.1f} h at {STEP_SHARE:.0%} of the peak"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
