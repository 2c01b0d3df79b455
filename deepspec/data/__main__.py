"""``python -m deepspec.data <command> key=value…``: the data steps on ``recipes/data.yaml``. Knows no step's inside."""

import errno
import os
import shlex
import sys
from collections.abc import Callable

COMMANDS = {
    "prompts": "conversations from the sources → ${out}/prompts",
    "regenerate": "the target's answers → ${out}/responses; run again to continue",
    "preview": "conversations with supervised tokens coloured (--count N, --ids, --id ID, --plain)",
    "cache": "the target's hidden states → ${out}/cache; run again to continue",
    "inspect": "what a cache holds",
    "verify": "checksums of a cache",
    "merge": "one cache from several (--from FOLDER… --to FOLDER)",
    "subset": "a part of a cache (--from FOLDER --to FOLDER, --source NAME…, --ids FILE, --share P)",
    "estimate": "disk, memory and hours, before anything is made",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns 0, 1 for a named error, 2 for misuse, 130 after an interrupt."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or arguments[0] in ("-h", "--help") or arguments[0] not in COMMANDS:
        wrong = bool(arguments) and arguments[0] not in ("-h", "--help")
        out = sys.stderr if wrong else sys.stdout
        print("usage: python -m deepspec.data <command> [target=…] [data=…] [out=…] [key=value …]\n", file=out)
        print("\n".join(f"  {name:<12}{text}" for name, text in COMMANDS.items()), file=out)
        if wrong:
            print(f"\nunknown command '{arguments[0]}'", file=out)
        return 2 if wrong else 0
    command, rest = arguments[0], arguments[1:]
    from deepspec.data import commands

    run: Callable[[list[str]], str | None] = getattr(commands, command)
    try:
        following = run(rest)
    except KeyboardInterrupt:
        again = shlex.join(["python", "-m", "deepspec.data", command, *rest])
        print(f"\ninterrupted; what is done is kept. Continue with: {again}", file=sys.stderr)
        return 130
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # preview | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"error: the disk is full ({error}); what is done is kept: free space and run again", file=sys.stderr)
        return 1
    if following:
        print(f"next: {following}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
