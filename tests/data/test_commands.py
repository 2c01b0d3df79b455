"""The data commands as a user types them, on a tiny model in a folder; recipes compose; the dispatchers."""

import json
import re
import shlex
from pathlib import Path

import pytest

from deepspec import recipes
from deepspec.__main__ import main as deepspec
from deepspec.data import cache_build, commands, inspection
from deepspec.data.__main__ import COMMANDS, main
from deepspec.data.cache import CacheManifest, Origin
from deepspec.data.config import DataPipelineConfig
from deepspec.data.preview import as_text, by_token
from deepspec.data.responses import read_responses
from deepspec.data.sources import is_local
from deepspec.train.config import TrainConfig
from tests.data.little_chat import built, chat_tokenizer
from tests.tiny import tiny_model

ROOT = Path(cache_build.__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-model")
    made = tiny_model("llama", vocab_size=128)
    made.generation_config.eos_token_id = 1
    made.save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


def options(model, tmp_path, *more):
    return [
        "target=custom", "target.name=tiny", f"target.path={model}", f"out={tmp_path}/run", "data=demo",
        "prompts.limit=12", "regenerate.max_new_tokens=6", "regenerate.batch_size=4", *more,
    ]  # fmt: skip


def test_prompts_regenerate_preview(model, tmp_path, capsys):
    assert main(["prompts", *options(model, tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "12 training and 120 held-out prompts" in out
    assert "next: python -m deepspec.data regenerate target=custom" in out

    assert main(["preview", "--plain", "--count=1", *options(model, tmp_path)]) == 0
    assert "no answer yet" in capsys.readouterr().out

    assert main(["regenerate", *options(model, tmp_path, "regenerate.limit=5")]) == 0
    out = capsys.readouterr().out
    assert "12 prompts = 5 answered" in out
    assert "7 skipped (over regenerate.limit)" in out
    assert main(["regenerate", *options(model, tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "12 prompts = 12 answered" in out
    assert "next: python -m deepspec.data cache" in out
    rows = list(read_responses(tmp_path / "run" / "responses"))
    assert len({row.id for row in rows}) == 12
    assert json.loads((tmp_path / "run" / "responses" / "manifest.json").read_text())["stamp"]["target"] == "tiny"

    assert main(["preview", "--plain", "--ids", "--id", rows[3].id, *options(model, tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert rows[3].id in shown[0]
    assert sum("●" in line for line in shown) == len(rows[3].tokens)


def test_supervised_tokens_are_marked(capsys):
    from deepspec.data.chat import encode

    tokenizer = chat_tokenizer()
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    encoded = encode(tokenizer, messages, thinking=False)
    assert as_text(tokenizer, encoded, colour=False) == "<s>user\nab</s>\n<s>assistant\n⟦cd</s>⟧\n"
    assert as_text(tokenizer, encoded, colour=True).count("\033[32m") == 1
    marked = [line for line in by_token(tokenizer, encoded, colour=False).splitlines() if "●" in line]
    assert [line.split()[-1] for line in marked] == ["'c'", "'d'", "'</s>'"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["regenerate", "out=nowhere"], 1, "run python -m deepspec.data prompts"),
        (["prompts", "prompts.limitt=3"], 1, "limitt"),
        (["prompts", "prompts.limit=0"], 1, "prompts.limit is 0"),
        (["prompts", "data=nothing"], 1, "Known groups"),
        (["regenerate", "regenerate.engine=openai"], 1, "regenerate.servers"),
        (["regenerat"], 2, "unknown command 'regenerat'"),
    ],
)
def test_misuse_says_what_to_do(arguments, status, message, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (
        main([*arguments, *([] if status == 2 else ["target=custom", "target.name=t", f"target.path={model}"])])
        == status
    )
    assert message in capsys.readouterr().err


def following(arguments, capsys):
    """The words of the command that is printed as the next one."""
    assert main(arguments) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("next: torchrun ")
    return shlex.split(line.removeprefix("next: "))


def test_training_is_offered_on_the_cache_that_was_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cache_build, "build_cache", lambda config: None)
    monkeypatch.setattr(inspection, "verify", lambda config: None)
    given = ["target=qwen3-8b", "target.path=/models/q8", "target.thinking=true", "target.taps=[1,2]"]
    for command in ("cache", "verify"):
        words = following([command, *given, f"out={tmp_path}/run", "cache.folder=small", "cache=int8"], capsys)
        assert words[-6:] == [*given, f"out={tmp_path}/run", f"data.path={tmp_path}/run/small"]
        assert following([command, "cache=int8"], capsys)[-2:] == ["target=qwen3-4b", "out=runs/qwen3-4b"]


def test_training_on_a_recombined_cache_names_its_target(tmp_path, capsys):
    whole, part = str(tmp_path / "run" / "cache"), str(tmp_path / "part")
    built(tmp_path / "run", count=6)
    made_for = ["target=tiny-chat", "target.taps=[0,1,2]", "target.thinking=false", f"data.path={part}"]
    assert following(["subset", "--from", whole, "--to", part, "--source", "other", "made-up"], capsys)[-4:] == made_for
    made_for[-1] = f"data.path={tmp_path}/again"
    assert following(["merge", "--from", whole, part, "--to", f"{tmp_path}/again"], capsys)[-4:] == made_for


def test_a_target_without_a_recipe_is_named_by_its_path():
    target = {"name": "mine", "path": "/models/mine"}
    manifest = CacheManifest(Origin(target, [0, 3], True, "", "bf16"), [], "", [])
    found = ["target.path=/models/mine", "target.name=mine", "target.taps=[0,3]", "target.thinking=true"]
    assert commands._made_for(manifest) == found
    loaded = recipes.load("train", ["+recipe=dspark", *found], TrainConfig).target
    assert (loaded.name, loaded.path, loaded.taps, loaded.thinking) == ("mine", "/models/mine", [0, 3], True)


def test_an_interrupt_says_how_to_continue(model, tmp_path, monkeypatch, capsys):
    from deepspec.data import regenerate as module

    def interrupted(*_):
        raise KeyboardInterrupt

    assert main(["prompts", *options(model, tmp_path)]) == 0
    monkeypatch.setattr(module, "_answer", interrupted)
    assert main(["regenerate", *options(model, tmp_path)]) == 130
    assert "Continue with: python -m deepspec.data regenerate target=custom" in capsys.readouterr().err
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    assert main(["regenerate", *options(model, tmp_path)]) == 130
    assert "torchrun --standalone --nproc-per-node 2 -m deepspec.data regenerate" in capsys.readouterr().err


def test_an_error_of_the_hub_is_one_line(model, tmp_path, monkeypatch, capsys):
    from deepspec.models import target

    def gated(*_, **__):
        raise OSError("You are trying to access a gated repo.\nMake sure to have access to it.")

    monkeypatch.setattr(target.Target, "load", gated)
    assert main(["prompts", *options(model, tmp_path)]) == 0
    capsys.readouterr()
    assert main(["regenerate", *options(model, tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("a gated repo. Make sure to have access to it.")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    try:
        status = main([command, "--help"])
    except SystemExit as ended:  # one with a parser of its own
        status = ended.code
    assert status == 0
    said = capsys.readouterr().out
    assert f"usage: python -m deepspec.data {command}" in said
    for file in re.findall(r"deepspec/\S+\.py|recipes/\w+\.yaml", said):
        assert (ROOT / file).is_file(), file


@pytest.mark.parametrize("root", ["data", "train"])
def test_recipe_roots_name_the_files_of_their_options(root):
    head = (ROOT / "recipes" / f"{root}.yaml").read_text().split("\ndefaults:")[0]
    named = re.findall(r"deepspec/\w+/\w+\.py", head)
    assert len(named) > 1
    assert all((ROOT / file).is_file() for file in named)


def test_a_full_disk_is_named(model, tmp_path, monkeypatch, capsys):
    from deepspec.data import prompts as module

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_json", full)
    assert main(["prompts", *options(model, tmp_path)]) == 1
    assert "the disk is full" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["demo", "perfectblend", "ultrachat", "sharegpt", "alpaca"])
def test_every_source_recipe_composes(name):
    config = recipes.load("data", [f"data={name}", "target=smollm2-135m"], DataPipelineConfig)
    (source,) = config.prompts.sources.values()
    assert is_local(source) == (name == "demo")
    assert config.prompts_dir.parts[-2:] == ("smollm2-135m", "prompts")


def test_sources_can_be_mixed_and_changed_from_the_command_line():
    overrides = ["data=[perfectblend,alpaca,custom]", "prompts.sources.alpaca.weight=0.5", "prompts.limit=1000",
                 "prompts.sources.custom.path=x.jsonl"]  # fmt: skip
    config = recipes.load("data", overrides, DataPipelineConfig)
    weights = {name: source.weight for name, source in config.prompts.sources.items()}
    assert weights == {"perfectblend": 1.0, "alpaca": 0.5, "custom": 1.0}


def test_a_file_of_ones_own_needs_only_its_path():
    given = ["data=custom", "prompts.sources.custom.path=x.jsonl"]
    assert recipes.load("data", given, DataPipelineConfig).prompts.sources["custom"].path == "x.jsonl"
    with pytest.raises(recipes.RecipeError, match=r"prompts\.sources\.custom\.path"):
        recipes.load("data", given[:1], DataPipelineConfig)


def test_help_lists_the_commands(capsys):
    assert main([]) == 0
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)
    assert deepspec([]) == 0
    assert deepspec(["bake"]) == 2
    assert deepspec(["data"]) == 0
    shown = capsys.readouterr()
    assert "unknown command 'bake'" in shown.err
    assert "python -m deepspec.data" in shown.out
