"""`python -m rollplex_client.cli`: the command without an installed script."""

import sys

from rollplex_client.cli import main

if __name__ == "__main__":
    sys.exit(main())
