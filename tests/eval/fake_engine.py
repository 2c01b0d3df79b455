"""A serving engine that recites: llama.cpp's and OpenAI's dialects, in this process or as a program like llama-server.

As a program it reads the answers from TARGET.json beside the GGUF file, those under "drafted" with -md, else "plain".
"""

import json
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PROGRAM = f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n'


def handler(answers, texts=None):
    """``answers``: prompt ids joined by spaces → {"tokens", "timings"}; ``texts``: the same → text, where token ids
    are not told."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

        def do_GET(self):
            self.reply({"build_info": "b0-fake", "data": [{"id": "fake"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            name = " ".join(map(str, body["prompt"]))
            if name not in answers:
                self.reply({"error": "unknown prompt"}, 400)
            elif self.path == "/completion":
                self.reply({**answers[name], "tokens_evaluated": len(body["prompt"])})
            elif texts is None:
                self.reply({"choices": [{"text": "", "token_ids": answers[name]["tokens"]}]})
            else:
                self.reply({"choices": [{"text": texts[name]}]})

        def reply(self, value, status=200):
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


@contextmanager
def serving(answers, texts=None):
    """Base URL of a server in this process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(answers, texts))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def program(path: Path) -> Path:
    """This module as an executable at ``path``."""
    path.write_text(PROGRAM)
    path.chmod(0o755)
    return path


if __name__ == "__main__":
    print("arguments:", json.dumps(sys.argv[1:]), flush=True)
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    stored = json.loads(Path(options["-m"] + ".json").read_text())
    if "-md" in options and not Path(options["-md"]).is_file():
        sys.exit("no drafter")
    answers = stored["drafted" if "-md" in options else "plain"]
    ThreadingHTTPServer((options["--host"], int(options["--port"])), handler(answers)).serve_forever()
