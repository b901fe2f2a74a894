"""The `tpplan` command, and `python -m tpplan`: Ctrl-C is no traceback from the first import on."""

import sys


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        from tpplan.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("tpplan: interrupted", file=sys.stderr)
        return 130  # as `tpplan.cli.exit_codes` has it, whose import may be what was interrupted


if __name__ == "__main__":
    sys.exit(main())
