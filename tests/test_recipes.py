"""Every recipe composes with every target and size; what cannot be composed is named in one line."""

import dataclasses
import itertools

import pytest
import yaml

from deepspec import recipes
from deepspec.data.config import DataPipelineConfig
from deepspec.train.config import TrainConfig

TARGETS = [name for name in recipes.names("target") if name != "custom"]
PAPER = ["qwen3-4b", "qwen3-8b", "qwen3-14b", "gemma4-12b"]  # the targets of its Table 1
OTHERS = ["llama3.1-8b", "qwen3-30b-a3b", "smollm2-135m"]
KINDS = {"dspark": "dspark", "dspark-rnn": "dspark", "dflash": "dflash", "eagle3": "eagle3"}
STAGES = {"1x24gb": 1, "1x80gb": 1, "8x80gb": 2, "4x8x80gb": 2, "cpu": 0, "auto": 1}


def train(*overrides: str) -> TrainConfig:
    return recipes.load("train", overrides, TrainConfig)


@pytest.mark.parametrize("recipe", recipes.names("recipe"))
def test_every_recipe_composes_with_every_target(recipe):
    for target in TARGETS:
        cfg = train(f"+recipe={recipe}", f"target={target}")
        assert (cfg.name, cfg.target.name) == (recipe, target)
        assert cfg.out == f"runs/{target}"
        assert cfg.data.path == f"runs/{target}/cache"
        assert cfg.folder == f"runs/{target}/drafters/{recipe}"
        assert cfg.drafter.kind == KINDS[recipe]


@pytest.mark.parametrize(
    ("group", "prefix"), [("engine", "engine="), ("optim", "optim="), ("tracking", "tracking="), ("size", "+size=")]
)
def test_every_option_composes_with_both_kinds_of_drafter(group, prefix):
    for recipe, name in itertools.product(("dflash", "eagle3"), recipes.names(group)):
        if name.startswith("demo") and (name == "demo-eagle3") != (recipe == "eagle3"):
            continue
        assert train(f"+recipe={recipe}", f"{prefix}{name}").name == recipe


@pytest.mark.slow  # 196 compositions; the groups alone are composed above
@pytest.mark.parametrize("target", [*PAPER, *OTHERS])
@pytest.mark.parametrize("recipe", KINDS)
def test_every_cell_composes_with_every_machine_and_size(recipe, target):
    assert sorted(STAGES) == recipes.names("engine")
    chosen = [f"+recipe={recipe}", f"target={target}", "train.dry_run=true"]
    for machine, stage in STAGES.items():
        cfg = train(*chosen, f"engine={machine}")
        assert (cfg.drafter.kind, cfg.target.name, cfg.engine.zero) == (KINDS[recipe], target, stage)
        assert (cfg.train.dry_run, cfg.folder) == (True, f"runs/{target}/drafters/{recipe}")
    small = train(*chosen, "+size=demo-eagle3" if recipe == "eagle3" else "+size=demo")
    assert (small.drafter.kind, small.drafter.draft_vocab_size) == (KINDS[recipe], 4096)


@pytest.mark.parametrize("target", TARGETS)
def test_the_data_pipeline_composes_with_every_target(target):
    cfg = recipes.load("data", [f"target={target}"], DataPipelineConfig)
    assert cfg.target.name == target
    assert cfg.out == f"runs/{target}"


def test_dspark_has_the_values_of_the_paper():
    cfg = train("+recipe=dspark")
    drafter, loss, data, run, optim = cfg.drafter, cfg.loss, cfg.data, cfg.train, cfg.optim
    assert (drafter.layers, drafter.block_size, drafter.markov_rank, drafter.markov_head) == (5, 7, 256, "vanilla")
    assert (loss.ce, loss.tv, loss.confidence, loss.gamma_decay) == (0.1, 0.9, 1.0, 4.0)
    assert (data.anchors, data.max_length, data.global_batch) == (512, 4096, 512)
    assert (run.lr, run.epochs, optim.schedule, optim.warmup, optim.final) == (6e-4, 10, "cosine", 0.04, 0.0)
    assert (optim.weight_decay, optim.clip) == (0.0, 1.0)
    assert (optim.beta1, optim.beta2) == (0.9, 0.999)  # torch's, as the public trainer leaves them


@pytest.mark.parametrize(("block", "decay"), [(7, 4.0), (9, 5.0), (15, 7.0)])
def test_the_position_decay_follows_the_block_unless_it_is_given(block, decay):
    assert train("+recipe=dspark", f"drafter.block_size={block}").loss.gamma_decay == decay
    assert train("+recipe=dspark", f"drafter.block_size={block}", "loss.gamma_decay=2").loss.gamma_decay == 2.0


def test_the_compared_drafters_differ_in_kind_and_loss_only():
    dspark, dflash, eagle = train("+recipe=dspark"), train("+recipe=dflash"), train("+recipe=eagle3")
    for other in (dflash, eagle):
        assert (other.optim, other.engine, other.train) == (dspark.optim, dspark.engine, dspark.train)
        assert other.target == dspark.target  # and its taps
        assert other.drafter.block_size == dspark.drafter.block_size
        # seed, held-out share, batch and length; EAGLE-3 trains at every token and has no anchors
        anchors = other.data.anchors if other is eagle else dspark.data.anchors
        assert other.data == dataclasses.replace(dspark.data, anchors=anchors)
        assert other.regenerate == dspark.regenerate
    assert (dflash.drafter.markov_rank, dflash.drafter.confidence) == (0, False)
    assert (dflash.loss.ce, dflash.loss.tv, dflash.loss.confidence) == (1.0, 0.0, 0.0)
    assert (eagle.drafter.layers, eagle.drafter.ttt_length, eagle.loss.step_decay) == (1, 7, 0.8)
    assert train("+recipe=dspark-rnn").drafter.markov_head == "rnn"


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("+recipe=unknown", "recipe/unknown"),
        ("train.lrr=1", "train.lrr"),
        ("train.lr=fast", "train.lr"),
        ("target=qwen3-4bb", "target/qwen3-4bb"),
        ("engine.zero=7", "engine.zero=7"),
        ("optim.schedule=linear", "optim.schedule='linear'"),
        ("+optimm.lr=1", "optimm"),
        ("+train.lrr=1", "lrr"),
        ("data.anchors=0", "data.anchors"),
        ("drafter.kind=medusa", "drafter.kind='medusa'"),
    ],
)
def test_what_cannot_be_composed_is_named(override, named):
    chosen = ["+recipe=dspark", override] if not override.startswith("+recipe") else [override]
    with pytest.raises(recipes.RecipeError) as error:
        train(*chosen)
    first = str(error.value).splitlines()[0]
    assert named in first
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("overrides", "name", "path"),
    [
        (["target=Qwen/Qwen3-4B-Instruct"], "qwen3-4b", "Qwen/Qwen3-4B-Instruct"),
        (["target.path=org/My-Model-it"], "my-model", "org/My-Model-it"),
        (["target=org/Model", "target.name=mine"], "mine", "org/Model"),
        (["target=tiny-qwen3", "target.path=some/folder"], "tiny-qwen3", "some/folder"),
    ],
)
def test_an_unlisted_target_is_a_hub_id_or_a_folder(overrides, name, path):
    cfg = train("+recipe=dspark", *overrides)
    assert (cfg.target.name, cfg.target.path, cfg.out) == (name, path, f"runs/{name}")
    assert cfg.target.taps is None


def test_a_local_folder_without_a_slash_is_a_target(tmp_path, monkeypatch):
    (tmp_path / "mymodel").mkdir()
    monkeypatch.chdir(tmp_path)
    assert train("+recipe=dspark", "target=mymodel").target.path == "mymodel"


def test_the_recipe_files_are_small_and_not_copies():
    seen: dict[str, str] = {}
    for path in sorted(recipes.recipes_dir().rglob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 40, path
        if path.parent.name in ("recipe", "optim", "tracking"):
            content = str(yaml.safe_load(text))
            assert content not in seen, (path, seen.get(content))
            seen[content] = str(path)


def test_online_training_reads_the_responses():
    cfg = train("+recipe=dspark", "data=online", "out=elsewhere")
    assert (cfg.data.source, cfg.data.path, cfg.data.prompts) == ("online", "elsewhere/responses", None)
    cfg = train("+recipe=dspark", "data=prompts", "out=elsewhere", "regenerate.temperature=0.7")
    assert (cfg.data.source, cfg.data.path) == ("online", "elsewhere/responses")
    assert (cfg.data.prompts, cfg.regenerate.temperature) == ("elsewhere/prompts/train.jsonl", 0.7)
    with pytest.raises(recipes.RecipeError, match=r"data\.prompts=x contradicts data\.source=cache"):
        train("+recipe=dspark", "data.prompts=x")


def test_dictionaries_take_new_keys_and_everything_else_is_checked():
    def data(*overrides):
        return recipes.load(
            "data", ["data=custom", "prompts.sources.custom.path=x.jsonl", *overrides], DataPipelineConfig
        )

    assert list(recipes.dictionaries(DataPipelineConfig)) == [
        "prompts.sources",
        "regenerate.chat_template_kwargs",
        "regenerate.extra_body",
    ]
    cfg = data("prompts.sources.custom.columns.prompt=q", "regenerate.extra_body={top_k:null,a:1}")
    assert cfg.prompts.sources["custom"].columns == {"prompt": "q"}
    assert cfg.regenerate.extra_body == {"top_k": None, "a": 1}
    with pytest.raises(recipes.RecipeError, match="'pth' not in 'SourceConfig'"):
        data("prompts.sources.custom.pth=x")
    with pytest.raises(recipes.RecipeError, match=r"custom\.limit=abc: Value 'abc'.*Integer"):
        data("prompts.sources.custom.limit=abc")
    with pytest.raises(recipes.RecipeError, match=r"prompts\.lmit"):
        data("prompts.lmit=3")
