"""Decoding of every prompt with every variant: resumable, split over ranks, timed, in turns.

Neither chooses drafters nor summarises.
"""

import contextlib
import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepspec import distributed
from deepspec.data import chat
from deepspec.eval import alternation, records
from deepspec.eval.progress import Progress
from deepspec.eval.records import Record, Recorder
from deepspec.eval.scheduler import Scheduler, make_schedule
from deepspec.eval.sps import load_profile
from deepspec.eval.suites import Loaded, Prompt
from deepspec.eval.summary import Variant
from deepspec.files import provenance, sha256_file
from deepspec.models.decode import DECODE_SEMANTICS, Completion, Timings, generate, prompt_problem
from deepspec.models.sampling import Sampling
from deepspec.models.target import Target
from deepspec.models.verify import CONDITIONAL

WARM_UP_TOKENS = 8


AskKey = tuple[str, str, int]  # data set, prompt id, turn
Entry = tuple[Variant, Any]  # a variant and its drafter, None for plain decoding


class RunError(ValueError):
    """An evaluation that cannot go on."""


@dataclass(frozen=True)
class RunConfig:
    """What, besides the variant, decides an answer and its rounds."""

    sampling: Sampling
    max_new_tokens: int
    thinking: bool
    seed: int
    confidence_threshold: float | None = None
    threshold_on: str = CONDITIONAL
    schedule: str | None = None  # causal, plateau or async, with ``sps``: the file of the target's SPS table
    sps: Path | None = None


@dataclass(frozen=True)
class Ask:
    """One answer to give: the conversation so far as token ids."""

    dataset: str
    prompt: str
    turn: int
    ids: tuple[int, ...]
    messages: tuple[dict[str, Any], ...]

    @property
    def key(self) -> tuple[str, str, int]:
        """As in Record."""
        return self.dataset, self.prompt, self.turn

    @property
    def index(self) -> int:
        """The same whatever else is evaluated: limits, ranks and resumes do not change the draws."""
        name = json.dumps(self.key).encode()
        return int.from_bytes(hashlib.sha256(name).digest()[:7], "big")

    @property
    def digest(self) -> str:
        """Names the token ids."""
        return hashlib.sha256(",".join(map(str, self.ids)).encode()).hexdigest()[:16]


@dataclass
class Plan:
    """Asks by data set, and the prompts that cannot be asked with the reason."""

    asks: dict[str, list[Ask]]
    skipped: dict[str, list[dict[str, str]]] = field(default_factory=dict)


def first_turns(target: Target, loaded: Sequence[Loaded], config: RunConfig) -> Plan:
    """The first turn of every prompt; one that is too long or that the template refuses is skipped with its reason."""
    plan = Plan({item.name: [] for item in loaded}, {item.name: [] for item in loaded})
    for item in loaded:
        for prompt in item.prompts:
            _add(plan, target, config, prompt, 0, (*prompt.prefix, {"role": "user", "content": prompt.turns[0]}))
    return plan


def next_turns(
    plan: Plan, target: Target, loaded: Sequence[Loaded], config: RunConfig, decoded: Mapping[str, Sequence[Record]]
) -> list[Ask]:
    """Extend the plan by each prompt's next turn, after the answers in ``decoded``; returns what was added."""
    prompts = {(item.name, prompt.id): prompt for item in loaded for prompt in item.prompts}
    answers = {record.key: record for answered in decoded.values() for record in answered}
    latest = {(ask.dataset, ask.prompt): ask for asks in plan.asks.values() for ask in asks}
    skipped = {(dataset, item["prompt"]) for dataset, items in plan.skipped.items() for item in items}
    added = []
    for (dataset, name), ask in latest.items():
        prompt, turn = prompts[dataset, name], ask.turn + 1
        if (dataset, name) not in skipped and turn < len(prompt.turns) and ask.key in answers:
            answer = answers[ask.key].tokens
            text = target.tokenizer.decode(answer, skip_special_tokens=True)
            said = (*ask.messages, {"role": "assistant", "content": text})
            new = _add(plan, target, config, prompt, turn, (*said, {"role": "user", "content": prompt.turns[turn]}))
            added += [new] if new is not None else []
    return added


def _add(
    plan: Plan, target: Target, config: RunConfig, prompt: Prompt, turn: int, messages: tuple[dict[str, Any], ...]
) -> Ask | None:
    try:
        ids = tuple(chat.render_prompt(target.tokenizer, messages, config.thinking))
        problem = prompt_problem(target, ids, config.max_new_tokens)
    except chat.ChatError as error:
        problem = str(error)
    if problem is not None:
        reason = f"prompt {prompt.id}, turn {turn + 1}: {problem}"
        plan.skipped[prompt.dataset].append({"prompt": prompt.id, "reason": reason})
        return None
    ask = Ask(prompt.dataset, prompt.id, turn, ids, messages)
    plan.asks[prompt.dataset].append(ask)
    return ask


class Session:
    """Decodes variants into ``output``; every rank of a torchrun job makes one and takes its share of the prompts."""

    def __init__(self, target: Target, config: RunConfig, output: Path, *, quiet: bool = False) -> None:
        self.target, self.config, self.output = target, config, output
        self.quiet = quiet or not distributed.is_main()
        self.name = session_name()
        self.revision = provenance()["git_revision"]
        self._recorders: dict[str, Recorder] = {}
        self._warm: set[str] = set()

    def settings(self, variant: Variant, semantics: int | None = DECODE_SEMANTICS) -> str:
        """Names everything that decides the rounds of a variant; records of another key are not reused.

        ``semantics`` None gives the key that versions before it had one wrote.
        """
        fields = {
            "target": self.target.fingerprint,
            "dtype": str(self.target.dtype),
            "device": self.target.device.type,
            "variant": variant.id,
            "drafter": variant.drafter.get("fingerprint"),
            "draft": variant.draft,
            "threshold": self._threshold(variant),
            "threshold_on": None if self._threshold(variant) is None else self.config.threshold_on,
            "sampling": vars(self.config.sampling),
            "max_new_tokens": self.config.max_new_tokens,
            "thinking": self.config.thinking,
            "seed": self.config.seed,
        }
        if semantics is not None:
            fields["semantics"] = semantics
        if "taps" in variant.drafter:
            fields["taps"] = variant.drafter["taps"]
        if "max_probability" in variant.drafter:
            fields["max_probability"] = True
        if self._scheduled(variant):
            table = sha256_file(str(self.config.sps))
            fields |= {"schedule": self.config.schedule, "sps": table, "batch": variant.batch}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    def _scheduled(self, variant: Variant) -> bool:
        return self.config.schedule is not None and bool(variant.drafter.get("confidence"))

    def _schedule(self, variant: Variant, asks: Sequence[Ask]) -> Scheduler | None:
        """A fresh scheduler with the table of these prompts' context, half of the answer included, and drafting."""
        if not self._scheduled(variant):
            return None
        context = sum(len(ask.ids) for ask in asks) // len(asks) + self.config.max_new_tokens // 2
        table = load_profile(str(self.config.sps)).rounds_at(context, min(variant.batch, len(asks)))
        return make_schedule(str(self.config.schedule), sps=table)

    def _threshold(self, variant: Variant) -> float | None:
        return self.config.confidence_threshold if variant.drafter.get("confidence") else None

    def outdated(self, variant: Variant) -> int:
        """Answers of earlier versions of the decoder, under settings that are the same but for that."""
        files = self.output.glob(f"records-{variant.id}-rank*.jsonl")
        return len(records.read(files, self.settings(variant, semantics=None)))

    def existing(self, variant: Variant, asks: Mapping[str, Sequence[Ask]]) -> dict[tuple[str, str, int], Record]:
        """Records of earlier runs, under the same settings, that answer these very prompts."""
        found = records.read(self.output.glob(f"records-{variant.id}-rank*.jsonl"), self.settings(variant))
        wanted = {ask.key: ask.digest for group in asks.values() for ask in group}
        return {key: record for key, record in found.items() if wanted.get(key) == record.prompt_digest}

    def decode(self, entries: Sequence[Entry], asks: Mapping[str, Sequence[Ask]]) -> dict[str, dict[str, list[Record]]]:
        """Records of all asks by variant id and data set, in the order of the asks; only missing ones are decoded.

        Variants take turns within every block of prompts (alternation.py). Raises RunError.
        """
        done = {variant.id: self.existing(variant, asks) for variant, _ in entries}
        distributed.barrier()  # nobody writes before everybody has read
        self._decode_missing(entries, asks, done)
        distributed.barrier()
        return {variant.id: self._complete(variant, asks) for variant, _ in entries}

    def _decode_missing(
        self,
        entries: Sequence[Entry],
        asks: Mapping[str, Sequence[Ask]],
        done: Mapping[str, Mapping[AskKey, Record]],
    ) -> None:
        """Decode this rank's share. Blocks are cut from all prompts, so that a resumed run times the same batches."""
        share = {name: group[distributed.rank() :: distributed.world_size()] for name, group in asks.items()}
        mine = [ask for group in share.values() for ask in group]
        pending = sum(ask.key not in done[variant.id] for variant, _ in entries for ask in mine)
        if not pending:
            return
        size = alternation.block_size(max(variant.batch for variant, _ in entries))
        number = 0
        with contextlib.ExitStack() as stack:
            progress = stack.enter_context(contextlib.closing(Progress(len(mine) * len(entries), pending, self.quiet)))
            for name, group in share.items():
                _check_indices(name, group)
                blocks = alternation.blocks(group, size)
                for (variant, drafter), block in alternation.turns(entries, blocks, first=number):
                    missing = [ask for ask in block if ask.key not in done[variant.id]]
                    if missing:
                        recorder = self._recorder(variant, stack)
                        for record in self._records(variant, drafter, missing, progress):
                            recorder.add(record)
                            progress.finished(record)
                number += len(blocks)

    def _complete(self, variant: Variant, asks: Mapping[str, Sequence[Ask]]) -> dict[str, list[Record]]:
        """What is on disk now, of all ranks; raises RunError where an answer is missing."""
        done = self.existing(variant, asks)
        missing = [ask.key for group in asks.values() for ask in group if ask.key not in done]
        if missing:
            raise RunError(
                f"{len(missing)} answers of {variant.id} are missing, the first is {missing[0]}: {self.output} must be "
                "on a file system that all ranks share"
            )
        return {name: [done[ask.key] for ask in group] for name, group in asks.items() if group}

    def _recorder(self, variant: Variant, stack: contextlib.ExitStack) -> Recorder:
        """The file that this rank's answers of a variant go to; open until the stack is left."""
        if variant.id not in self._recorders:
            path = self.output / f"records-{variant.id}-rank{distributed.rank()}.jsonl"
            recorder = Recorder(path, self.settings(variant), self.revision)
            self._recorders[variant.id] = recorder
            stack.callback(self._recorders.pop, variant.id)
            stack.callback(recorder.close)
        return self._recorders[variant.id]

    def _warm_up(self, variant: Variant, drafter: Any, ask: Ask) -> None:
        """First-call costs (kernels, allocator) belong to no measurement: once for each variant."""
        if variant.id in self._warm:
            return
        self._warm.add(variant.id)
        for _ in self._generate(variant, drafter, [ask], min(WARM_UP_TOKENS, self.config.max_new_tokens), None, None):
            pass

    def _records(self, variant: Variant, drafter: Any, asks: Sequence[Ask], progress: Progress) -> Iterator[Record]:
        """Decode one block of a data set's prompts."""
        self._warm_up(variant, drafter, asks[0])
        progress.turn_of(variant)
        by_index = {ask.index: ask for ask in asks}
        timings = Timings()  # passing one makes the loop wait for the device where it books seconds
        for completion in self._generate(variant, drafter, asks, self.config.max_new_tokens, timings, progress):
            yield _record(by_index[completion.index], completion, self.name)

    def _generate(
        self,
        variant: Variant,
        drafter: Any,
        asks: Sequence[Ask],
        max_new_tokens: int,
        timings: Timings | None,
        progress: Progress | None,
    ) -> Iterator[Completion]:
        return generate(
            self.target,
            [ask.ids for ask in asks],
            indices=[ask.index for ask in asks],
            drafter=drafter,
            block=None if drafter is None else variant.block,
            batch_size=variant.batch,
            sampling=self.config.sampling,
            max_new_tokens=max_new_tokens,
            seed=self.config.seed,
            confidence_threshold=self._threshold(variant),
            threshold_on=self.config.threshold_on,
            schedule=self._schedule(variant, asks),
            greedy_draft=variant.draft == "greedy",
            timings=timings,
            progress=None if progress is None else progress.tokens,
        )


def session_name() -> str:
    """A name for this run of the command, the same on every rank."""
    names = [uuid.uuid4().hex[:12]]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(names)
    return names[0]


def _record(ask: Ask, completion: Completion, session: str) -> Record:
    rounds = completion.rounds
    with_confidence = any(item.confidence is not None for item in rounds)
    share = completion.share
    return Record(
        dataset=ask.dataset,
        prompt=ask.prompt,
        turn=ask.turn,
        prompt_digest=ask.digest,
        prompt_tokens=len(ask.ids),
        tokens=list(completion.tokens),
        finish=completion.finish_reason,
        rounds=[(item.proposed, item.accepted, item.committed) for item in rounds],
        confidence=[[round(c, 5) for c in item.confidence or ()] for item in rounds] if with_confidence else None,
        wall=round(share.total, 6),
        prefill=round(share.prefill, 6),
        draft=round(share.draft, 6),
        verify=round(share.verify, 6),
        other=round(share.other, 6),
        session=session,
    )


def _check_indices(name: str, asks: Sequence[Ask]) -> None:
    if len({ask.index for ask in asks}) < len(asks):
        raise RunError(f"two prompts of {name} share a seed index: rename one")
