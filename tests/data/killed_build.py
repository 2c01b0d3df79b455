"""A cache build that kills its own process (SIGKILL) at a chosen point; runs in a process of its own."""

import os
import signal
import sys
import threading
from pathlib import Path

import torch

from deepspec.data.cache_build import build_cache
from tests.data.little_chat import chat_target, pipeline

WATCHED = (
    f"data{os.sep}cache",
    f"data{os.sep}record",
    f"data{os.sep}capture",
    f"deepspec{os.sep}files",
    "tempfile",
    "shutil",
)


def build(folder: str, kill_at: int | None, count_to: str | None = None, **cache) -> None:
    """Build the cache of ``folder``; the process dies at the ``kill_at``-th call into the code that writes it.

    ``count_to`` is a file that receives the number of such calls in a build that is not killed.
    """
    torch.set_num_threads(1)  # a forked process must not wait for its parent's threads
    calls = 0

    def watch(frame, event, _argument):
        nonlocal calls
        if event in ("call", "c_call") and any(part in frame.f_code.co_filename for part in WATCHED):
            calls += 1
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    cfg, target = pipeline(Path(folder), **cache), chat_target()
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        build_cache(cfg, target)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if count_to is not None:
        Path(count_to).write_text(str(calls))
