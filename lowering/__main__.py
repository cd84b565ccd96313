"""`python -m lowering` is the command `onnx-lowering`."""

import sys

from .cli import main

sys.exit(main())
