"""`python -m isobit` is the `isobit` command."""

import sys

from isobit.cli.main import main

sys.exit(main())
