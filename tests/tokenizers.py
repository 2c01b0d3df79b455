"""Small real fast tokenizers, trained here in a moment, with hand-written templates in the style of each family."""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "user assistant system model tool The quick brown fox jumps over the lazy dog. Hello! How are you? I am fine.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))\n\n```python\nfor i in range(10):\n    print(i)\n```",
    "Two plus two is four. The answer is 4. Paris is the capital of France. 1 2 3 4 5 6 7 8 9 0",
    '{"name": "weather", "arguments": {"city": "Rome"}} im_start im_end think start_of_turn end_of_turn eot_id',
] * 3

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ '<think>\n\n</think>\n\n' if not enable_thinking }}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Reasoning of earlier turns is dropped; the last turn always has a thinking block; tool results are user turns.
QWEN3 = (
    "{%- if tools %}{{- '<|im_start|>system\n# Tools\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- set ns = namespace(last=-1) %}{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}"
    "{%- set content = message.content if message.content is string else '' %}"
    "{%- if message.role == 'assistant' %}"
    "{%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}"
    "{%- if not reasoning and '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{%- else %}{{- content }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}{%- if not loop.first or content %}{{- '\n' }}{%- endif %}"
    "{{- '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
# No system role (as the first Gemma templates), strict alternation.
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' "
    "+ message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token }}{% else %}{{ raise_exception('only user and assistant') }}{% endif %}"
    "{% endfor %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{% else %}{{ '<｜Assistant｜>' + message['content'].split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' + ('<think>\n' if thinking else '') }}{% endif %}"
)
# gpt-oss: channels; the last answer ends with <|return|>, earlier ones with <|end|>.
HARMONY = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message['content'] }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}{{ '<|start|>' + message['role'] + '<|message|>' + message['content'] + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)


def _byte_level(special: list[str], plain: list[str], merged: int = 120) -> Tokenizer:
    """GPT-2 style: byte-level BPE whose pre-tokens never cross a control token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + merged, initial_alphabet=sorted(alphabet), show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    return backend


def _sentencepiece(special: list[str], prepend: bool) -> Tokenizer:
    """Gemma or Mistral style: spaces become ▁, bytes as a fallback; Mistral puts a ▁ before the text."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if prepend:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    first = ["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=len(first) + 150, special_tokens=first, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    state = Tokenizer.from_str(backend.to_str())
    return _only_special(state, {"<unk>", *special})


def _only_special(backend: Tokenizer, special: set[str]) -> Tokenizer:
    """Byte pieces are vocabulary, not added tokens."""
    import json

    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in special]
    return Tokenizer.from_str(json.dumps(state))


def _wrap(backend: Tokenizer, template: str, eos: str, bos: str | None = None) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=bos)
    tokenizer.chat_template = template
    return tokenizer


@cache
def tokenizer(style: str) -> PreTrainedTokenizerFast:
    """One of chatml, marked, qwen3, llama3, gemma, mistral, deepseek, harmony."""
    chatml = ["<|im_start|>", "<|im_end|>"]
    if style in ("chatml", "marked", "qwen3"):
        markup = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
        backend = _byte_level(chatml, [] if style == "chatml" else markup)
        return _wrap(backend, {"chatml": CHATML, "marked": MARKED, "qwen3": QWEN3}[style], "<|im_end|>")
    if style == "llama3":
        special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
        return _wrap(_byte_level(special, []), LLAMA3, "<|eot_id|>", "<|begin_of_text|>")
    if style == "gemma":
        backend = _sentencepiece(["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], prepend=False)
        return _wrap(backend, GEMMA, "<eos>", "<bos>")
    if style == "mistral":
        return _wrap(_sentencepiece(["<s>", "</s>", "[INST]", "[/INST]"], prepend=True), MISTRAL, "</s>", "<s>")
    if style == "deepseek":
        special = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
        return _wrap(_byte_level(special, ["<think>", "</think>"]), DEEPSEEK, special[1], special[0])
    assert style == "harmony", style
    special = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"]
    return _wrap(_byte_level(special, []), HARMONY, "<|return|>")
