"""`python -m isobit` is the `isobit` command."""

import os
import sys

if __name__ == "__main__":
    if sys.path[:1] in (
        [""],
        [os.getcwd()],
    ):  # put first by -m; nothing in it may be imported unasked
        del sys.path[0]

    from isobit.cli.main import main

    sys.exit(main())
