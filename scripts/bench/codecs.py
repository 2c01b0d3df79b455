"""What a lossy cache costs in acceptance: the same drafter trained from bf16, int8 and int4 caches of the same states.

    python scripts/bench/codecs.py --cache runs/smollm2-135m/cache target=smollm2-135m +size=demo train.steps=300

The bf16 cache is re-encoded, each codec with the log-normalisers of the states that it decodes, so the caches differ in
nothing but the codec. Every drafter is judged on the held-out
samples of the bf16 cache: expected τ at temperature 1. Further arguments are those of the training command. Codecs are
compared within a seed, whose order of samples they share, and whose first ``--shared`` steps, on exact states: when a
short run finds its feet is chance, worth several per cent of τ in any codec, and would hide what is looked for. The
noise is the spread over seeds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deepspec.data.cache_reader import CacheReader
from deepspec.data.codecs import CODECS
from deepspec.data.loader import CacheSource, DataConfig, Loader
from deepspec.models import drafter as drafters
from deepspec.models.frozen_head import FrozenHead
from deepspec.train.objectives import LossWeights, denominators, objective
from scripts.bench.cache import reencode

ROOT = Path(__file__).resolve().parents[2]
HELDOUT, ANCHORS = 0.15, 64


def main() -> int:
    """Re-encode, train, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="a bf16 cache")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--shared", type=int, default=100, help="steps of a seed before its codecs part (0: none)")
    parser.add_argument("--recipe", default="dspark")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options, overrides = parser.parse_known_args()
    exact = CacheReader(options.cache)
    if exact.codec != "bf16":
        parser.error(f"--cache {options.cache} is {exact.codec}: give a bf16 cache, the others are made from it")
    taus: dict[str, list[float]] = {name: [] for name in CODECS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        caches = {"bf16": options.cache}
        target_head = head_of(exact)
        for name in CODECS:
            if name != "bf16":
                caches[name] = Path(reencode(exact, name, folder / name, target_head).path)
        for seed in options.seeds:
            given = overrides
            if options.shared:
                first = [*overrides, f"train.steps={options.shared}"]
                start = train(options.recipe, first, folder / f"shared-{seed}", options.cache, seed)
                given = [*overrides, f"train.init_from={start}", "train.warm_start=false"]
            for codec, path in caches.items():
                drafter = train(options.recipe, given, folder / f"{codec}-{seed}", path, seed)
                taus[codec].append(judge(drafter, exact))
                print(f"seed {seed}  {codec:<5} τ {taus[codec][-1]:.4f}", flush=True)
    results = {"taus": taus, "relative to bf16": {name: relative(taus, name) for name in taus if name != "bf16"}}
    spread = statistics.stdev(taus["bf16"]) / statistics.mean(taus["bf16"]) if len(options.seeds) > 1 else float("nan")
    for name, (mean, error) in results["relative to bf16"].items():
        print(f"{name}: τ {mean:+.2%} ± {error:.2%} of bf16 (mean and standard error over {len(options.seeds)} seeds)")
    print(f"bf16 alone varies by {spread:.2%} from seed to seed")
    if options.output:
        options.output.write_text(json.dumps(results, indent=1))
    return 0


def train(recipe: str, overrides: list[str], out: Path, cache: Path, seed: int) -> Path:
    """One run of the training command; the folder of its drafter."""
    command = ["torchrun", "--standalone", "--nproc-per-node", "1", str(ROOT / "deepspec/train/main.py")]
    command += [f"+recipe={recipe}", *overrides, f"out={out}", f"data.path={cache.resolve()}", f"train.seed={seed}"]
    command += [f"data.heldout={HELDOUT}", "train.eval_every=0", "train.save_every=0", "tracking=none"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"training failed: {' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return out / "drafters" / recipe / "best"


def head_of(cache: CacheReader) -> FrozenHead:
    """Embedding and head of the target that a cache was made from."""
    return FrozenHead.load(str(ROOT / "targets" / cache.manifest.target["name"]))


@torch.inference_mode()
def judge(folder: Path, exact: CacheReader) -> float:
    """Expected τ at temperature 1 on the held-out samples of the exact cache."""
    drafter = drafters.load(folder, head_of(exact))
    config = DataConfig(anchors=ANCHORS, heldout=HELDOUT, micro_tokens=4096, seed=0)
    loader = Loader(CacheSource(exact, 1), config, block_size=drafter.block_size)
    tau = torch.zeros(2)
    for batch in loader.heldout():
        batch = batch.to("cpu", torch.float32)
        weights = LossWeights()
        _, metrics = objective(drafter, batch, weights, denominators(batch, drafter.config, weights))
        tau += metrics["tau"]
    return float(tau[0] / tau[1])


def relative(taus: dict[str, list[float]], name: str) -> tuple[float, float]:
    """(mean, standard error) of τ relative to the bf16 drafter of the same seed."""
    changes = [lossy / exact - 1 for lossy, exact in zip(taus[name], taus["bf16"], strict=True)]
    error = statistics.stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else float("nan")
    return statistics.mean(changes), error


if __name__ == "__main__":
    sys.exit(main())
