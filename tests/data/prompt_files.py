"""Prompt sources written and read by the tests of both."""

import json

from deepspec.data.prompts import PromptsConfig, build, read_prompts


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def save(path, rows):
    """JSONL, JSONL.zst, JSON or Parquet by the name."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.name.endswith(".parquet"):
        import pyarrow as pa
        import pyarrow.parquet as parquet

        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.name.endswith(".zst"):
        import zstandard

        path.write_bytes(zstandard.compress(text.encode()))
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else text)
    return str(path)


def made(folder, **options):
    """Build and check the accounting; returns train records, held-out records and the summary."""
    summary = build(PromptsConfig(**options), folder)
    train, heldout = (read_prompts(folder / f"{split}.jsonl") for split in ("train", "heldout"))
    dropped = sum(sum(reasons.values()) for reasons in summary["dropped"].values())
    assert sum(summary["read"].values()) == len(train) + len(heldout) + dropped
    assert len({row["id"] for row in train + heldout}) == len(train) + len(heldout)
    return train, heldout, summary


def questions(rows):
    return [row["messages"][-1]["content"] for row in rows]
