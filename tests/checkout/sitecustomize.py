"""Python started with this folder on PYTHONPATH imports the packages that PYTHONPATH names, also where another checkout is installed editable.

scikit-build-core's editable install puts a finder before sys.path; without this a second checkout's tests would test the first one.
"""

from __future__ import annotations

import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
