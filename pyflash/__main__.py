"""The command line: python -m pyflash COMMAND."""

from __future__ import annotations

import argparse
import signal
import sys

from . import __version__
from .commands import Failed, bench, compile, demo, doctor, explain, joined
from .errors import CompileError, LaunchError, Unsupported

_COMMANDS = {
    "demo": (demo, "run attention here, forward and backward, check it, and compare it with ordinary attention"),
    "bench": (bench, "measure attention here, beside ordinary attention and every other implementation installed"),
    "doctor": (doctor, "say what PyFlash finds on this machine, and what mends what is missing"),
    "explain": (explain, "say what would run for a shape on a GPU, and why"),
    "compile": (compile, "compile kernels ahead of time"),
}


_EXIT_CODES = "Every command exits with 0 if it did what it was asked, 1 if it failed, 2 if it was called wrongly."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pyflash", description="Exact attention in O(N) memory.", epilog=_EXIT_CODES
    )
    parser.add_argument("--version", action="version", version=f"pyflash {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in _COMMANDS.items():
        module.add(commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."))
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run a command. 0: done; 1: it failed, and says why; 2: it was called wrongly."""
    args = _parser().parse_args(joined(sys.argv[1:] if arguments is None else arguments))
    try:
        return _COMMANDS[args.command][0].run(args)
    except (Failed, CompileError, LaunchError, Unsupported) as error:
        print(f"pyflash {args.command}: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the command in silence
    sys.exit(main())
