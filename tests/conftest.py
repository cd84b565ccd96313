"""`benchmarks` is a package of the checkout, behind all that is installed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
