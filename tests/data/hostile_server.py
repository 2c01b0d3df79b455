"""An OpenAI-compatible server in this process that can be made to misbehave."""

import json
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class HostileServer:
    """Answers "echo: <last message>". ``mode(number, body)`` says how the n-th completion misbehaves: None, "500",
    "400", "429", "garbage", "hang", "drop", "empty", "odd", or a dict merged into the reply's choice."""

    def __init__(self, mode=lambda number, body: None, model="served") -> None:
        self.mode = mode
        self.listed = [{"id": model}]
        self.bodies, self.seen = [], Counter()
        self.active = self.most_active = 0
        self.lock, self.released = threading.Lock(), threading.Event()
        self.port = None
        self.http = None

    @property
    def url(self):
        """Base URL; the same after a restart."""
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self):
        """Listen, on the port of last time if there was one."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def do_GET(self):
                self.reply(200, {"data": outer.listed})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    number = len(outer.bodies)
                    outer.bodies.append(body)
                    outer.seen[body["messages"][-1]["content"]] += 1
                    outer.active += 1
                    outer.most_active = max(outer.active, outer.most_active)
                try:
                    self.answer(outer.mode(number, body), body)
                finally:
                    with outer.lock:
                        outer.active -= 1

            def answer(self, mode, body):
                time.sleep(0.005)
                if mode == "hang":
                    outer.released.wait(20)
                    self.close_connection = True
                elif mode == "drop":
                    self.close_connection = True
                elif mode == "garbage":
                    self.reply(200, b"<html>not json \xff</html>")
                elif mode == "empty":
                    self.reply(200, {"choices": []})
                elif mode in ("500", "400", "429"):
                    self.reply(int(mode), {"error": f"made-up {mode}"})
                else:
                    text = "echo: " + body["messages"][-1]["content"]
                    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
                    choice.update({"finish_reason": "abort"} if mode == "odd" else mode or {})
                    usage = choice.pop("usage", {"completion_tokens": 3, "prompt_tokens": 5})
                    self.reply(200, {"choices": [choice], "usage": usage})

            def reply(self, status, value):
                content = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        ThreadingHTTPServer.allow_reuse_address = True
        self.http = ThreadingHTTPServer(("127.0.0.1", self.port or 0), Handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self):
        """Refuse connections from now on."""
        if self.http is not None:
            self.http.shutdown()
            self.http.server_close()
            self.http = None
        self.released.set()


@contextmanager
def serving(*modes):
    """Servers with these modes, stopped at the end."""
    servers = [HostileServer(mode).start() for mode in modes]
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()
