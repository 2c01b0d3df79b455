"""Everything a run needs before its first step, checked cheapest first: cache, target, drafter, earlier progress."""

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspec import distributed, recipes
from deepspec.data.cache import CacheMissingError
from deepspec.data.cache_reader import CacheReader
from deepspec.data.estimate import MEAN_SUPERVISED
from deepspec.data.loader import Loader, Source
from deepspec.data.sources import SourceError
from deepspec.models import drafter as drafters
from deepspec.models import families
from deepspec.models.draft_vocabulary import most_frequent
from deepspec.models.drafter_base import TrainedDrafter
from deepspec.models.export import checkpoint as folders
from deepspec.models.frozen_head import FrozenHead
from deepspec.models.target import Target, TargetError, gguf_file, load_tokenizer, resolve
from deepspec.models.warm_start import warm_start
from deepspec.train import checkpoint
from deepspec.train.config import TrainConfig, TrainConfigError
from deepspec.train.identity import check_identity, run_identity
from deepspec.train.objectives import objective

VOCABULARY_SAMPLES = 2048  # training samples whose tokens choose a reduced draft vocabulary


class Objective(nn.Module):
    """The module DeepSpeed wraps: drafter and loss in one forward, so that ZeRO 3 sees every use of a weight."""

    def __init__(self, drafter: TrainedDrafter, weights: Any) -> None:
        super().__init__()
        self.drafter, self.weights = drafter, weights

    def forward(self, batch: Any, denominators: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(loss, metrics) of one micro batch."""
        return objective(self.drafter, batch, self.weights, denominators)


@dataclass
class Prepared:
    """A run ready to start. ``target`` is loaded for online data and for real decoding only."""

    cfg: TrainConfig
    device: torch.device
    dtype: torch.dtype
    loader: Loader
    drafter: TrainedDrafter
    target: Target | None
    target_fingerprint: str
    taps: tuple[int, ...]
    state: checkpoint.TrainingState | None
    total_steps: int
    identity: dict[str, Any]  # what a later part of this run is compared with

    @property
    def objective(self) -> Objective:
        """Drafter and loss as one module."""
        return Objective(self.drafter, self.cfg.loss)

    @property
    def supervised(self) -> float:
        """Share of the tokens that are labels; an assumed one without a cache."""
        reader = getattr(self.loader.source, "reader", None)
        return MEAN_SUPERVISED if reader is None else float(reader.states.sum() / reader.tokens.sum())


def check_data(cfg: TrainConfig) -> None:
    """Raise CacheMissingError or SourceError with the command that makes what is not there; costs one file lookup."""
    prompts, name = cfg.data.prompts, cfg.target.name
    listed = name != "custom" and name in recipes.names("target")
    unlisted = shlex.join([f"target.path={cfg.target.path}", f"target.name={name}", f"out={cfg.out}"])
    target = f"target={name}" if listed else unlisted
    if prompts is not None and not Path(prompts).is_file():
        raise SourceError(
            f"no prompts in {prompts}: write them with `python -m deepspec.data prompts {target}`, or give "
            "data.prompts=FILE"
        )
    if cfg.data.source == "cache":
        try:
            CacheReader(cfg.data.path)
        except CacheMissingError as error:
            steps = f"`python -m deepspec.data prompts|regenerate|cache {target}`"
            remedy = f"`make cache MODEL={name}` (or {steps})" if listed else steps
            raise CacheMissingError(
                f"no target cache in {cfg.data.path}: build it with {remedy}, or train with data=online"
            ) from error


def prepare(cfg: TrainConfig, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Open data and target, prove that they fit, build the drafter and give it the weights it starts from."""
    check_data(cfg)
    state = checkpoint.read(cfg.folder)
    if state is not None and not cfg.train.resume and not cfg.train.dry_run:
        raise checkpoint.ResumeError(
            f"{cfg.folder} holds a run at step {state.progress.step} and train.resume=false: give name=… for a new "
            "run, or delete that folder"
        )
    target = _target(cfg, device)
    if cfg.data.prompts is not None and state is None:
        _answer(cfg, cfg.data.prompts, target)
    head, source, taps, fingerprint = _open(cfg, target, device, dtype)
    loader = Loader(
        source,
        cfg.data,
        block_size=cfg.drafter.block_size,
        anchored=cfg.drafter.kind != "eagle3",
        rank=distributed.rank(),
        world_size=distributed.world_size(),
    )
    if not loader.heldout_rows and (cfg.train.early_stop or cfg.train.decode_every):
        raise TrainConfigError(
            f"no sample of {cfg.data.path} is held out (data.heldout={cfg.data.heldout:g}), and train.early_stop and "
            "train.decode_every judge by held-out samples: raise data.heldout, or leave them off"
        )
    total = cfg.train.steps or cfg.train.epochs * loader.steps_per_epoch
    identity = run_identity(cfg, tuple(taps), loader, fingerprint)
    if state is not None and not cfg.train.dry_run:
        unknown = check_identity(state, identity, cfg.folder)
        if unknown and distributed.is_main():
            print(
                f"note: {cfg.folder} is of an earlier version, which did not record {', '.join(unknown)}: not compared"
            )
    drafter = _drafter(cfg, head, taps, loader, _text_config(cfg, target))
    drafter.recompute = cfg.engine.recompute
    if state is not None and not cfg.train.dry_run:
        drafter.load_state_dict(state.kind("master"), strict=False)
    elif state is not None:
        state = None
    return Prepared(cfg, device, dtype, loader, drafter, target, fingerprint, tuple(taps), state, total, identity)


def same_on_all_ranks(run: Prepared) -> None:
    """Raise ResumeError where ranks see different checkpoints or data: they would train on in silence, apart."""
    step = 0 if run.state is None else run.state.progress.step
    everyone = distributed.gathered([f"step {step}, samples {run.identity['digest of the samples']}"])
    if len(set(everyone)) > 1:
        seen = "; ".join(f"rank {rank}: {facts}" for rank, facts in enumerate(everyone))
        raise checkpoint.ResumeError(
            f"ranks do not see the same run and data ({seen}): {run.cfg.folder} and {run.cfg.data.path} must be on a "
            "file system that all nodes share"
        )


def _target(cfg: TrainConfig, device: torch.device) -> Target | None:
    """The whole target, where a run needs it: for online data, and on the main rank for real decoding."""
    if cfg.data.source == "online" or (cfg.train.decode_every and distributed.is_main()):
        return Target.load(cfg.target, device)
    return None


def _answer(cfg: TrainConfig, prompts: str, target: Target | None) -> None:
    """Let the target answer the prompts, every rank its share. Before the first step only: a run keeps its samples.

    Answers are written like those of ``python -m deepspec.data regenerate``, so that a run stopped here goes on from
    what it has. A dry run answers the prompts of one global batch.
    """
    from deepspec.data.setup import answer_prompts

    given = cfg.regenerate
    if cfg.train.dry_run:
        given = dataclasses.replace(given, limit=min(cfg.data.global_batch, given.limit or cfg.data.global_batch))
    with distributed.unhurried():
        answer_prompts(Path(prompts), Path(cfg.data.path), cfg.target, given, target)


def _open(
    cfg: TrainConfig, target: Target | None, device: torch.device, dtype: torch.dtype
) -> tuple[FrozenHead, Source, tuple[int, ...], str]:
    from deepspec.data.training_data import open_cache, open_online

    # A CPU rounds bfloat16 products to bfloat16, which logits do not bear: up to 3 % of a probability at a logit of 8.
    dtype = torch.float32 if device.type == "cpu" else dtype
    if cfg.data.source == "online":
        assert target is not None
        head = FrozenHead.of(target).to(device, dtype)
        return head, open_online(cfg.data, target, cfg.target.thinking), target.taps, target.fingerprint
    head = FrozenHead.load(resolve(cfg.target), dtype, device, cfg.target.revision)
    config = _text_config(cfg, target)
    # without the whole target its body is not compared: a fine-tune that leaves the head alone passes
    whole = None if target is None else target.fingerprint
    cached = open_cache(
        cfg.data, cfg.target, head=head, text_config=config, tokenizer=_tokenizer(cfg), fingerprint=whole
    )
    manifest = cached.reader.manifest
    return head, cached, manifest.taps, manifest.target["fingerprint"]


def _tokenizer(cfg: TrainConfig) -> Any:
    """The target's tokenizer, to compare with the cache's; None, with a note, for a target that has none."""
    try:
        return load_tokenizer(resolve(cfg.target), cfg.target.revision)
    except TargetError as error:
        if distributed.is_main():
            print(f"note: {error}. That the cache was built with this target's chat template is not checked")
        return None


def _text_config(cfg: TrainConfig, target: Target | None) -> Any:
    if target is not None:
        return target.config
    from transformers import AutoConfig

    path = resolve(cfg.target)
    gguf = gguf_file(path)
    options = {"gguf_file": gguf} if gguf else {}
    return families.text_config(AutoConfig.from_pretrained(path, revision=cfg.target.revision, **options))


def _drafter(cfg: TrainConfig, head: FrozenHead, taps: tuple[int, ...], loader: Loader, config: Any) -> TrainedDrafter:
    if cfg.train.init_from is None:
        ids = _draft_ids(loader, head.vocab_size, cfg.drafter.draft_vocab_size)
        drafter = drafters.build(cfg.drafter, config, head, taps, draft_ids=ids, seed=cfg.train.seed)
        if cfg.train.warm_start:
            warm_start(drafter, resolve(cfg.target), cfg.target.revision)
        return drafter
    start = folders.find(cfg.train.init_from) or cfg.train.init_from
    drafter = drafters.load(start, head, taps=taps, dtype=torch.float32).train()
    if drafter.taps != tuple(taps):
        raise TrainConfigError(
            f"train.init_from={cfg.train.init_from} reads taps {list(drafter.taps)}, the data holds {list(taps)}: "
            "build a cache with its taps (target.taps=…)"
        )
    there, here = dataclasses.asdict(drafter.config), dataclasses.asdict(cfg.drafter)
    here["mask_token_id"] = there["mask_token_id"] if here["mask_token_id"] is None else here["mask_token_id"]
    differing = [f"drafter.{key}={here[key]} (there {there[key]})" for key in here if here[key] != there[key]]
    if differing:
        raise TrainConfigError(
            f"train.init_from={cfg.train.init_from} is another kind of drafter: {', '.join(differing)}; set these to "
            "the checkpoint's values"
        )
    drafter.metadata, drafter.confidence_scale = {}, None  # said of the weights that training now changes
    return drafter


def _draft_ids(loader: Loader, vocab_size: int, size: int | None) -> list[int] | None:
    """The most frequent supervised tokens of the first training samples; None for the whole vocabulary."""
    if size is None:
        return None
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    rows = loader.training_rows[:VOCABULARY_SAMPLES]
    for start in range(0, len(rows), 32):
        for sample in loader.source.samples(rows[start : start + 32]):
            counts_V += torch.bincount(sample.tokens_S[sample.supervised_S], minlength=vocab_size)
    return most_frequent(counts_V, size)
