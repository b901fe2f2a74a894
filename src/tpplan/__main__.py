"""`python -m tpplan`: the same as the `tpplan` command."""

import sys

from tpplan.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
