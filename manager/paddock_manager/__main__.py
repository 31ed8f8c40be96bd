"""`python -m paddock_manager` is `paddock`."""

from __future__ import annotations

import sys

from paddock_manager.cli import main

sys.exit(main())
