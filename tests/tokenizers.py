"""Small real fast tokenizers, trained here in a moment, with hand-written templates in the style of each family."""

from collections.abc import Sequence
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
    "{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\n\n' }}"
    "{%- if message.tool_calls %}{%- set call = message.tool_calls[0].function %}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}' }}"
    "{%- else %}{{- message['content'] | trim }}{%- endif %}{{- '<|eot_id|>' }}"
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
# Tool results and the answer to them continue the assistant's turn; arguments must be text already.
DEEPSEEK = (
    "{{ bos_token }}{% set ns = namespace(tool=false) %}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{% set ns.tool = false %}"
    "{% elif message['role'] == 'tool' %}{% set ns.tool = true %}"
    "{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}"
    "{% else %}{{ '<｜Assistant｜>' if not ns.tool }}{{ message['content'].split('</think>')[-1] }}"
    "{% for call in message.tool_calls or [] %}{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>'"
    " + call.function.arguments + '<｜tool▁call▁end｜>' }}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.tool %}"
    "{{ '<｜Assistant｜>' + ('<think>\n' if thinking else '') }}{% endif %}"
)
# gpt-oss: channels; the last answer ends with <|return|>, earlier ones with <|end|>; reasoning only before the last.
HARMONY = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% if loop.last and 'thinking' in message %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message['content'] }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}{{ '<|start|>' + message['role'] + '<|message|>' + message['content'] + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
# The prompt, not the conversation, holds an empty thinking channel; tool results continue the model's turn, which then
# ends at the token that opens them.
GEMMA4 = (
    "{{- bos_token }}{%- set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{%- if enable_thinking or tools or system %}{{- '<|turn>system\n' }}{{- '<|think|>\n' if enable_thinking }}"
    "{{- system | trim }}"
    "{%- for tool in tools or [] %}{{- '<|tool>declaration:' + tool.function.name + '<tool|>' }}{%- endfor %}"
    "{{- '<turn|>\n' }}{%- endif %}"
    "{%- set ns = namespace(open=false, answered=false) %}"
    "{%- for message in messages if message.role != 'system' %}"
    "{%- if message.role == 'user' %}{{- '<|turn>user\n' + (message.content | trim) + '<turn|>\n' }}"
    "{%- set ns.open = false %}"
    "{%- elif message.role == 'assistant' %}{{- '<|turn>model\n' if not ns.open }}"
    "{%- for call in message.tool_calls or [] %}{{- '<|tool_call>call:' + call.function.name + '{' }}"
    "{%- for key, value in call.function.arguments | dictsort %}{{- key + ':<|\"|>' + value + '<|\"|>' }}{%- endfor %}"
    "{{- '}<tool_call|>' }}{%- endfor %}"
    "{%- if message.tool_calls %}{%- set ns.open = true %}{%- set ns.answered = false %}"
    "{%- for result in messages[loop.index + (1 if system else 0):] if result.role == 'tool' %}"
    "{{- '<|tool_response>response:{value:<|\"|>' + result.content + '<|\"|>}<tool_response|>' }}"
    "{%- set ns.answered = true %}{%- endfor %}{{- '<|tool_response>' if not ns.answered }}"
    "{%- else %}{{- message.content.split('<channel|>')[-1] | trim + '<turn|>\n' }}{%- set ns.open = false %}"
    "{%- endif %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt and not ns.open %}{{- '<|turn>model\n' }}"
    "{{- '<|channel>thought\n<channel|>' if not enable_thinking }}{%- endif %}"
)
QWEN25 = (
    "{%- set system = messages[0].content if messages[0].role == 'system' else 'You are Qwen.' %}"
    "{{- '<|im_start|>system\n' + system }}"
    "{%- if tools %}{{- '\n\n# Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}"
    "{{- '\n</tools>' }}{%- endif %}{{- '<|im_end|>\n' }}"
    "{%- for message in messages if message.role != 'system' %}"
    "{%- if message.role == 'assistant' and message.tool_calls %}{{- '<|im_start|>assistant' }}"
    "{{- '\n' + message.content if message.content }}"
    "{%- for call in message.tool_calls %}"
    "{{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}{{- '<|im_start|>user' if loop.previtem.role != 'tool' }}"
    "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# Later Mistral models: no generation prompt, no spaces, calls with an id of at least nine characters.
MISTRAL3 = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if message.role == 'system' %}{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}"
    "{%- elif message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}"
    "{%- elif message.role == 'tool' %}"
    "{{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' }}"
    "{%- elif message.tool_calls %}{{- '[TOOL_CALLS][' }}{%- for call in message.tool_calls %}"
    "{%- if call.id | length < 9 %}{{- raise_exception('Tool call IDs have nine characters') }}{%- endif %}"
    "{{- (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}{{- ', ' if not loop.last }}{%- endfor %}"
    "{{- ']' + eos_token }}"
    "{%- else %}{{- message.content + eos_token }}{%- endif %}{%- endfor %}"
)


def _byte_level(special: Sequence[str], plain: Sequence[str], merged: int = 120) -> Tokenizer:
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


def _sentencepiece(special: Sequence[str], prepend: bool) -> Tokenizer:
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


MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
GEMMA4_SPECIAL = (
    "<bos>", "<eos>", "<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>",
    "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
)  # fmt: skip
DEEPSEEK_PLAIN = (  # as published, these are added tokens but not special
    "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip
# style: template, end of sequence, beginning, special tokens, added tokens that are not special
BYTE_LEVEL = {
    "chatml": (CHATML, "<|im_end|>", None, ("<|im_start|>", "<|im_end|>"), ()),
    "marked": (MARKED, "<|im_end|>", None, ("<|im_start|>", "<|im_end|>"), MARKUP),
    "qwen3": (QWEN3, "<|im_end|>", None, ("<|im_start|>", "<|im_end|>"), MARKUP),
    "qwen2.5": (QWEN25, "<|im_end|>", None, ("<|im_start|>", "<|im_end|>"), MARKUP[2:4]),
    "llama3": (LLAMA3, "<|eot_id|>", "<|begin_of_text|>",
               ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), ()),
    "mistral3": (MISTRAL3, "</s>", "<s>", ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
                                           "[TOOL_CALLS]", "[TOOL_RESULTS]", "[TOOL_CONTENT]",
                                           "[/TOOL_RESULTS]"), ()),
    "deepseek": (DEEPSEEK, "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>",
                 ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"), DEEPSEEK_PLAIN),
    "harmony": (HARMONY, "<|return|>", None, ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"), ()),
}  # fmt: skip
SENTENCEPIECE = {
    "gemma": (GEMMA, "<eos>", "<bos>", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), False),
    "gemma4": (GEMMA4, "<eos>", "<bos>", GEMMA4_SPECIAL, False),
    "mistral": (MISTRAL, "</s>", "<s>", ("<s>", "</s>", "[INST]", "[/INST]"), True),
}
STYLES = (*BYTE_LEVEL, *SENTENCEPIECE)


@cache
def tokenizer(style: str) -> PreTrainedTokenizerFast:
    """The tokenizer of one of STYLES, with its template."""
    if style in BYTE_LEVEL:
        template, eos, bos, special, plain = BYTE_LEVEL[style]
        return _wrap(_byte_level(special, plain), template, eos, bos)
    template, eos, bos, special, prepend = SENTENCEPIECE[style]
    return _wrap(_sentencepiece(special, prepend=prepend), template, eos, bos)
