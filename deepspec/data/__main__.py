"""``python -m deepspec.data <command> key=value…``: the data steps on ``recipes/data.yaml``. Knows no step's inside."""

import errno
import os
import shlex
import sys
from collections.abc import Callable

USAGE = "usage: python -m deepspec.data {} [target=…] [data=…] [cache=…] [out=…] [key=value …]\n"
OPTIONS = """
  target=    {target}, a hub id or a folder
  data=      {data}
  cache=     {cache}
  out=       the run folder, runs/TARGET unless given
  any option by its path, as in prompts.limit=1000
Meanings and defaults: deepspec/data/prompts.py and sources.py (prompts.…), regenerate.py (regenerate.…), cache.py
(cache.…), deepspec/models/target.py (target.…); what a recipe sets is in recipes/, the root in recipes/data.yaml."""

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
OF_TRAINING = ("cache", "online", "prompts")  # recipes/data/ that say what training reads
OWN_OPTIONS = ("preview", "merge", "subset")  # commands with a parser, and so a --help, of their own


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns 0, 1 for an error that is named, 2 for misuse, 130 after an interrupt."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or arguments[0] in ("-h", "--help") or arguments[0] not in COMMANDS:
        wrong = bool(arguments) and arguments[0] not in ("-h", "--help")
        out = sys.stderr if wrong else sys.stdout
        print(USAGE.format("<command>"), file=out)
        print("\n".join(f"  {name:<12}{text}" for name, text in COMMANDS.items()), file=out)
        if wrong:
            print(f"\nunknown command '{arguments[0]}'", file=out)
        return 2 if wrong else 0
    command, rest = arguments[0], arguments[1:]
    if command not in OWN_OPTIONS and any(argument in ("-h", "--help") for argument in rest):
        from deepspec import recipes

        print(f"{USAGE.format(command)}\n  {COMMANDS[command]}")
        groups = {group: recipes.names(group) for group in ("target", "data", "cache")}
        groups["data"] = [name for name in groups["data"] if name not in OF_TRAINING]
        print(OPTIONS.format(**{group: " | ".join(names) for group, names in groups.items()}))
        return 0
    from deepspec import distributed
    from deepspec.data import commands

    run: Callable[[list[str]], str | None] = getattr(commands, command)
    try:
        following = run(rest)
    except KeyboardInterrupt:
        if distributed.is_main():
            several = ["torchrun", "--standalone", "--nproc-per-node", str(distributed.local_world_size())]
            launch = ["python"] if distributed.world_size() == 1 else several
            again = shlex.join([*launch, "-m", "deepspec.data", command, *rest])
            print(f"\ninterrupted; what is done is kept. Continue with: {again}", file=sys.stderr)
        return 130
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # preview | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        text = " ".join(str(error).split())  # of a hub: several lines
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = f"the disk is full ({text}); what is done is kept: free space and run again"
        print(f"error: {text}", file=sys.stderr)
        return 1
    if following and distributed.is_main():
        print(f"next: {following}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
