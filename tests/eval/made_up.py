"""Made-up but plausible records and results, so that tables and reports can be tested without decoding."""

from typing import Any

import numpy as np

from deepspec.eval import compare, metrics, summary
from deepspec.eval.records import Record
from deepspec.eval.summary import Variant

DOMAINS = {
    "gsm8k": "math",
    "math500": "math",
    "aime25": "math",
    "humaneval": "code",
    "mbpp": "code",
    "livecodebench": "code",
    "mt-bench": "chat",
    "alpaca": "chat",
    "arena-hard-v2": "chat",
}
EASE = {"math": 0.86, "code": 0.82, "chat": 0.68}


def records(dataset: str, variant: Variant, count: int, strength: float, seed: int = 0) -> list[Record]:
    """Prompts whose draft positions are accepted with a chance that decays along the block."""
    generator = np.random.default_rng([seed, sum(map(ord, dataset)), sum(map(ord, variant.label))])
    out = []
    for index in range(count):
        ease = np.clip(EASE[DOMAINS[dataset]] * strength + generator.normal(0, 0.04), 0.05, 0.97)
        rounds = []
        shape = (int(generator.integers(8, 30)), variant.block)
        chance = np.clip(ease * 0.98 ** np.arange(variant.block) + generator.normal(0, 0.12, shape), 0.02, 0.99)
        for accepted in np.cumprod(generator.uniform(size=shape) < chance, axis=1).sum(axis=1).tolist():
            rounds.append((variant.block, accepted, accepted + 1))
        confidences = np.clip(chance + 0.06, 0.01, 0.995).round(4).tolist()
        tokens = 1 + sum(item[2] for item in rounds)
        step = 0.031 + 0.0012 * variant.block + 0.0001 * variant.batch
        wall = len(rounds) * step / variant.batch**0.7
        out.append(
            Record(
                dataset=dataset,
                prompt=f"{dataset}/{index}",
                turn=0,
                prompt_digest="",
                prompt_tokens=90,
                tokens=list(range(tokens)),
                finish="stop" if index % 9 else "length",
                rounds=rounds,
                confidence=confidences if variant.kind == "dspark" else None,
                wall=wall,
                prefill=wall * 0.05,
                draft=wall * (0.2 if variant.block else 0.0),
                verify=wall * 0.65,
                other=wall * (0.1 if variant.block else 0.3),
            )
        )
    return out


def plain_records(like: list[Record], batch: int) -> list[Record]:
    """Plain decoding of the same answers: one token per round."""
    out = []
    for record in like:
        count = len(record.tokens) - 1
        wall = count * 0.031 / batch**0.7
        out.append(
            Record(
                **{
                    **record.__dict__,
                    "rounds": [(0, 0, 1)] * count,
                    "confidence": None,
                    "wall": wall,
                    "prefill": wall * 0.05,
                    "draft": 0.0,
                    "verify": wall * 0.85,
                    "other": wall * 0.1,
                }
            )
        )
    return out


def results(datasets: list[str], drafters: dict[str, float], *, count: int = 20, sweep: bool = True) -> dict[str, Any]:
    """A complete results.json: plain decoding and drafters (label → strength), with a block and batch sweep."""
    variants, out = [], []
    tallies: dict[str, dict[str, metrics.Tally]] = {}
    for batch in (1, 8) if sweep else (1,):
        variants.append((Variant("plain", "plain", 0, batch, headline=batch == 1), 0.0))
        for label, strength in drafters.items():
            for block in range(1, 8) if sweep else (7,):
                headline = batch == 1 and block == 7
                folder = {"folder": f"runs/tiny/drafters/{label}/best", "fingerprint": label * 3, "thinking": False}
                variants.append((Variant(label, label, block, batch, headline, drafter=folder), strength))
    base = Variant(next(iter(drafters)), "dspark", 7, 1)
    answers = {name: records(name, base, count, 1.0) for name in datasets}
    for variant, strength in variants:
        plain = {name: plain_records(answers[name], variant.batch) for name in datasets}
        if variant.kind == "plain":
            tallies[variant.id] = summary.tallies_of(plain, 0)
            out.append(summary.variant_results(variant, plain, None, DOMAINS, 0))
            continue
        decoded = {name: records(name, variant, count, strength) for name in datasets}
        tallies[variant.id] = summary.tallies_of(decoded, variant.block)
        item = summary.variant_results(variant, decoded, plain, DOMAINS, 0)
        for name in datasets:
            item["datasets"][name]["identity"] = identity(count, ties=1 if name == "mbpp" else 0)
        out.append(item)
    return {
        "format": summary.FORMAT,
        "version": summary.VERSION,
        "created": "2030-01-01T12:00:00+00:00",
        "command": "python -m deepspec.eval --suite all --drafter runs/tiny/drafters/dspark",
        "settings": {
            "suites": ["all"],
            "temperature": 0.0,
            "max_new_tokens": 2048,
            "turns": "first",
            "thinking": False,
            "draft_sampling": "probabilistic",
            "confidence_threshold": None,
            "device": "cpu",
            "dtype": "float32",
            "seed": 0,
        },
        "target": {"name": "tiny", "path": "targets/tiny", "fingerprint": "ab" * 32},
        "datasets": [
            {
                "name": name,
                "domain": DOMAINS[name],
                "prompts": count,
                "rows": 500,
                "source": f"data/{name}.jsonl",
                "revision": None,
                "published": True,
                "skipped": [],
            }
            for name in datasets
        ],
        "variants": out,
        "comparison": compare.comparison(out, tallies, 0),
        "best_blocks": compare.best_blocks(out, tallies, 0),
        "revisions": ["c0ffee"],
        "provenance": {
            "versions": {"deepspec": "0.1.0", "torch": "2.15.0"},
            "python": "3.11",
            "git_revision": "c0ffee",
        },
    }


def identity(count: int, ties: int = 0) -> dict[str, Any]:
    """The identity check of one data set."""
    first = {
        "prompt": "mbpp/3",
        "position": 17,
        "plain": 5,
        "drafter": 9,
        "gap": 0.0004,
        "tolerance": 0.001,
        "tie": True,
    }
    return {
        "prompts": count,
        "identical": count - ties,
        "ties": ties,
        "different": 0,
        "first_difference": first if ties else None,
    }
