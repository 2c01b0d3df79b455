"""An engine for tests whose answers depend on the request alone."""

import random
import time
from collections import deque

from deepspec.data.engines import Answer
from deepspec.data.regenerate import Stamp
from deepspec.models.sampling import Sampling

STAMP = Stamp("scripted", False, 16, 0, vars(Sampling()))


def answer_text(request) -> str:
    """What the engine answers to a request."""
    return f"{request.id}/{request.turn} after {len(request.messages)} messages"


class ScriptedEngine:
    """Answers out of order, up to 8 at a time; fails the ids in ``failing``."""

    def __init__(self, failing=frozenset(), cut=frozenset(), seconds=0.0, seed=0) -> None:
        self.failing, self.cut, self.seconds = failing, cut, seconds
        self.draw = random.Random(seed)
        self.asked = []
        self.on_tokens = lambda count: None

    def run(self, work: deque):
        """Yield answers in a random order."""
        flying = []
        while work or flying:
            while work and len(flying) < 8:
                flying.append(work.popleft())
            request = flying.pop(self.draw.randrange(len(flying)))
            self.asked.append((request.id, request.turn))
            time.sleep(self.seconds)
            self.on_tokens(3)
            if request.id in self.failing:
                yield Answer(request, error="refused")
            else:
                message = {"role": "assistant", "content": answer_text(request)}
                reason = "length" if request.id in self.cut else "stop"
                yield Answer(request, message=message, tokens=[5, 6, 1], finish_reason=reason)
