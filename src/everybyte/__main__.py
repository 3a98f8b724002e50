"""`python -m everybyte` is the console script `everybyte`."""

import sys

from .cli import main

sys.exit(main())
