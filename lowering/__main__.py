"""`python -m lowering` is the command `onnx-lowering`."""

import sys

from .tools.cli import main

sys.exit(main())
