"""The in-process engine on a tiny model: its own greedy answers, whatever the batch; defaults of sampling."""

from collections import deque

import pytest
import torch

from deepspec import recipes
from deepspec.data import engines, setup
from deepspec.data.chat import render_prompt
from deepspec.data.config import DataPipelineConfig
from deepspec.data.engines import (
    EngineError,
    Request,
    TransformersEngine,
    assistant_message,
    draw_index,
    sampling_from,
)
from deepspec.data.regenerate import Account, RegenerateConfig
from deepspec.models import decode
from deepspec.models.sampling import Sampling
from deepspec.models.target import TargetConfig
from deepspec.train.config import TrainConfig
from tests.data.little_chat import chat_target


@pytest.fixture(scope="module")
def target():
    return chat_target()


def requests(count):
    return [Request(f"p{n}", 0, [{"role": "user", "content": "a" * (3 * n % 11 + 1)}]) for n in range(count)]


def engine(target, batch_size=3, sampling=None, seed=0):
    return TransformersEngine(
        target, sampling=sampling or Sampling(), max_new_tokens=9, batch_size=batch_size, seed=seed, thinking=False
    )


def answers(engine, wanted):
    return {answer.request.id: answer for answer in engine.run(deque(wanted))}


def test_answers_are_the_models_own_greedy_tokens(target):
    found = answers(engine(target), requests(5))
    for request in requests(5):
        prompt = render_prompt(target.tokenizer, request.messages, False)
        tokens = list(prompt)
        for _ in range(9):  # naive: the whole forward again for each token
            logits = target.model(torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(logits.argmax()))
            if tokens[-1] in target.stop_ids:
                break
        answer = found[request.id]
        assert answer.tokens == tokens[len(prompt) :]
        assert answer.finish_reason == ("stop" if tokens[-1] in target.stop_ids else "length")
        text = answer.tokens[:-1] if answer.finish_reason == "stop" else answer.tokens
        assert answer.message["content"] == target.tokenizer.decode(text)


def test_out_of_memory_halves_the_batch_and_loses_no_answer(target, monkeypatch, capsys):
    def generate(target, prompts, *, batch_size, **options):
        found = decode.generate(target, prompts, batch_size=batch_size, **options)
        for _ in range(2):  # two answers come before the memory is full
            yield next(found)
        if batch_size > fits:
            raise torch.OutOfMemoryError
        yield from found

    monkeypatch.setattr(engines, "generate", generate)
    fits = 2
    limited = engine(target, 8)
    found = answers(limited, requests(9))
    assert limited.batch_size == 2
    assert "regenerate.batch_size=4" in capsys.readouterr().out
    monkeypatch.undo()
    assert {key: answer.tokens for key, answer in found.items()} == {
        key: answer.tokens for key, answer in answers(engine(target, 1), requests(9)).items()
    }
    monkeypatch.setattr(engines, "generate", generate)
    fits = 0
    with pytest.raises(EngineError, match="one prompt at a time"):
        answers(engine(target, 2), requests(9))


def test_sampled_answers_depend_on_seed_id_and_turn_only(target):
    warm = Sampling(temperature=1.0)
    one = answers(engine(target, 1, warm), requests(8))
    many = answers(engine(target, 5, warm), list(reversed(requests(8)))[:6])
    assert all(many[key].tokens == one[key].tokens for key in many)
    other = answers(engine(target, 1, warm, seed=1), requests(8))
    assert any(other[key].tokens != one[key].tokens for key in one)
    assert draw_index("a", 0) != draw_index("a", 1)
    assert 0 <= draw_index("a", 0) < 2**62


def test_follow_up_requests_join_and_problems_are_answers(target):
    work = deque([*requests(2), Request("long", 0, [{"role": "user", "content": "x" * 600}])])
    seen = []
    counted = []
    running = engine(target)
    running.on_tokens = counted.append
    for answer in running.run(work):
        seen.append((answer.request.id, answer.request.turn))
        if answer.error is None and answer.request.turn == 0:
            more = [*answer.request.messages, answer.message, {"role": "user", "content": "b"}]
            work.append(Request(answer.request.id, 1, more))
        elif answer.error is not None:
            assert "512 positions" in answer.error
    assert sorted(seen) == [("long", 0), ("p0", 0), ("p0", 1), ("p1", 0), ("p1", 1)]
    assert sum(counted) > 4


def test_thinking_is_kept_apart_from_the_answer():
    assert assistant_message("plain") == {"role": "assistant", "content": "plain"}
    both = {"role": "assistant", "content": "yes", "reasoning_content": "why"}
    assert assistant_message("<think>\nwhy\n</think>\n\nyes") == both
    assert assistant_message("why\n</think>\n\nyes") == both  # the prompt opened the block
    assert assistant_message("<|channel>thought\nwhy\n<channel|>yes") == both
    assert assistant_message("<think>\n\n</think>\n\nyes") == {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(
    ("model", "given", "expected"),
    [
        ({}, {}, Sampling()),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, {}, Sampling(0.6, 20, 0.95)),
        ({"do_sample": True, "top_k": 64, "top_p": 0.95}, {}, Sampling(1.0, 64, 0.95)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, {"temperature": 0.0}, Sampling()),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": None, "top_p": 0.5}, Sampling(0.6, 0, 0.5)),
        ({}, {"temperature": 1.0}, Sampling(1.0)),
        ({"top_k": 50, "do_sample": False}, {"temperature": 1.0}, Sampling(1.0)),
    ],
)
def test_sampling_comes_from_the_recipe_then_the_model(model, given, expected):
    assert sampling_from(model, given) == expected


def test_only_penalties_that_do_something_are_taken_from_the_model(monkeypatch):
    defaults = {"presence_penalty": 1.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    monkeypatch.setattr(setup, "generation_defaults", lambda target: defaults)
    given = RegenerateConfig(engine="openai", servers=["x"])
    assert setup.stamp_of(TargetConfig("t", "t"), given).sampling == vars(Sampling()) | {"presence_penalty": 1.0}


def test_a_generation_config_that_cannot_be_read_is_not_greedy(tmp_path, monkeypatch):
    """Greedy is what a target without one means, not what a client without network may assume."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    from transformers import GenerationConfig

    def absent(path, **_):
        raise OSError("no such file")

    def fails_with(error):
        def download(*_, **__):
            raise error

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)

    folder, hub = TargetConfig("t", str(tmp_path)), TargetConfig("t", "org/model")
    assert setup.generation_defaults(folder) == {}
    (tmp_path / "generation_config.json").write_text("not JSON")
    with pytest.raises(ValueError, match="cannot read the generation_config of"):
        setup.generation_defaults(folder)

    monkeypatch.setattr(GenerationConfig, "from_pretrained", absent)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    fails_with(EntryNotFoundError("404"))
    assert setup.generation_defaults(hub) == {}
    for error in (LocalEntryNotFoundError("offline"), ConnectionError("no network")):
        fails_with(error)
        with pytest.raises(
            ValueError, match=r"org/model: give regenerate\.temperature=… \(and top_k, top_p\), or access"
        ):
            setup.stamp_of(hub, RegenerateConfig())
    with pytest.raises(ValueError, match="top_k"):
        setup.stamp_of(hub, RegenerateConfig(temperature=0.7))
    assert setup.stamp_of(hub, RegenerateConfig(temperature=0.0)).sampling == vars(Sampling())
    all_given = RegenerateConfig(temperature=0.7, top_k=20, top_p=0.8)
    assert setup.stamp_of(hub, all_given).sampling == vars(Sampling(0.7, 20, 0.8))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: huggingface_hub._CACHED_NO_EXIST)
    assert setup.generation_defaults(hub) == {}


# --- Qwen3: one generation_config for two modes ---------------------------------------------------------------------

QWEN3 = [name for name in recipes.names("target") if name.startswith("qwen3-")]
QWEN3_CONFIG = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}


def composed(*overrides):
    cfg = recipes.load("data", overrides, DataPipelineConfig)
    return cfg.target, cfg.regenerate


@pytest.mark.parametrize("name", QWEN3)
@pytest.mark.parametrize(
    ("thinking", "expected"),
    [("false", Sampling(0.7, 20, 0.8, 0.0)), ("true", Sampling(0.6, 20, 0.95, 0.0))],
)
def test_qwen3_answers_with_its_cards_values_of_the_mode(name, thinking, expected, monkeypatch):
    monkeypatch.setattr(setup, "generation_defaults", lambda target: QWEN3_CONFIG)
    target, given = composed(f"target={name}", f"target.thinking={thinking}")
    plan = setup.sampling_plan(target, given)
    assert plan.values == expected
    assert plan.warning is None
    assert "target.sampling." in plan.source
    assert given.max_new_tokens == 4096
    stamp = setup.stamp_of(target, given)
    assert stamp.sampling == vars(expected)
    assert isinstance(stamp.sampling["top_k"], int)


def test_training_on_prompts_answers_in_the_same_way(monkeypatch):
    monkeypatch.setattr(setup, "generation_defaults", lambda target: QWEN3_CONFIG)
    cfg = recipes.load("train", ["+recipe=dspark", "target=qwen3-8b"], TrainConfig)
    assert setup.sampling_plan(cfg.target, cfg.regenerate).values == Sampling(0.7, 20, 0.8)


def test_what_is_given_goes_before_the_card_and_both_are_named(monkeypatch):
    monkeypatch.setattr(setup, "generation_defaults", lambda target: QWEN3_CONFIG)
    plan = setup.sampling_plan(*composed("target=qwen3-4b", "regenerate.temperature=1.0"))
    assert plan.values == Sampling(1.0, 20, 0.8)
    assert plan.source == (
        "temperature from regenerate; top_k, top_p, min_p from target.sampling.direct, the model's card"
    )
    plan = setup.sampling_plan(*composed("target=qwen3-4b", "target.sampling.direct.top_p=0.9"))
    assert plan.values == Sampling(0.7, 20, 0.9)
    plan = setup.sampling_plan(*composed("target=qwen3-4b", "regenerate.temperature=0"))
    assert (plan.values, plan.source) == (Sampling(), "temperature from regenerate")


def test_an_unlisted_qwen3_is_told_that_its_values_are_those_for_thinking(monkeypatch):
    monkeypatch.setattr(setup, "generation_defaults", lambda target: QWEN3_CONFIG)
    plan = setup.sampling_plan(*composed("target=org/My-Finetune"))
    assert plan.values == Sampling(0.6, 20, 0.95)
    assert plan.source == ("temperature, top_k, top_p from the model's generation_config; min_p from nobody, so off")
    assert plan.warning is not None
    assert "regenerate.temperature=0.7 regenerate.top_p=0.8" in plan.warning
    for more in (
        ["target.thinking=true"],
        ["regenerate.temperature=0.7", "regenerate.top_p=0.8", "regenerate.top_k=9"],
    ):
        assert setup.sampling_plan(*composed("target=org/My-Finetune", *more)).warning is None


def test_other_models_are_not_warned(monkeypatch):
    monkeypatch.setattr(
        setup, "generation_defaults", lambda target: {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    )
    plan = setup.sampling_plan(*composed("target=llama3.1-8b"))
    assert (plan.values, plan.warning) == (Sampling(0.6, 0, 0.9), None)
    monkeypatch.setattr(setup, "generation_defaults", lambda target: {})
    plan = setup.sampling_plan(*composed("target=org/Base"))
    assert (plan.values, plan.source) == (Sampling(), "temperature from nobody")


def test_the_printed_plan_says_where_its_sampling_comes_from(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(setup, "generation_defaults", lambda target: QWEN3_CONFIG)
    monkeypatch.setattr(setup, "regenerate", lambda *_, **__: Account())
    (tmp_path / "train.jsonl").write_text("")
    target, given = composed("target=org/My-Finetune")
    setup.answer_prompts(tmp_path / "train.jsonl", tmp_path / "responses", target, given)
    said = capsys.readouterr().out
    assert "my-finetune: thinking off, sampling {'temperature': 0.6" in said
    assert "from the model's generation_config" in said
    assert "WARNING" in said


@pytest.mark.parametrize("place", ["warm.temperature", "direct.heat"])
def test_a_misspelt_card_is_named(place):
    with pytest.raises(recipes.RecipeError, match=place.split(".")[place.startswith("direct")]):
        composed("target=qwen3-4b", f"target.sampling.{place}=1.0")


def test_the_demo_keeps_its_own_answers():
    _, given = composed("data=demo", "target=smollm2-135m")
    assert (given.max_new_tokens, given.temperature) == (128, 0.0)
