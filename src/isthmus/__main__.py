"""Entry point of `python -m isthmus`: the command line."""

import sys

from isthmus.cli import main

sys.exit(main())
