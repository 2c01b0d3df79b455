"""The ``deepspec`` console script: ``deepspec data …``, ``deepspec train …`` are ``python -m`` of the same modules."""

import importlib
import sys

COMMANDS = {
    "data": ("deepspec.data.__main__", "prompts, responses and target cache"),
    "train": ("deepspec.train.main", "train a drafter (several processes: torchrun deepspec/train/main.py)"),
    "eval": ("deepspec.eval.__main__", "speculative decoding on evaluation suites"),
    "calibrate": ("deepspec.eval.calibrate", "make a drafter's confidences mean what they say"),
    "profile": ("deepspec.eval.profile", "steps per second of a target against tokens per step"),
    "simulate": ("deepspec.eval.simulate", "serving under load with each verification schedule"),
    "report": ("deepspec.eval.report", "the HTML report of an evaluation"),
    "engine": ("deepspec.eval.engine_check", "a drafter inside a serving engine, against the evaluator"),
    "export": ("deepspec.models.export.__main__", "serving formats"),
}


def main(argv: list[str] | None = None) -> int:
    """Dispatch to the command's own ``main(argv)``; returns its exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] not in COMMANDS:
        for name, (_, text) in COMMANDS.items():
            print(f"deepspec {name:<11}{text}")
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            return 0
        print(f"deepspec: unknown command '{arguments[0]}'; the commands are above", file=sys.stderr)
        return 2
    module = importlib.import_module(COMMANDS[arguments[0]][0])
    return module.main(arguments[1:]) or 0


if __name__ == "__main__":
    raise SystemExit(main())
