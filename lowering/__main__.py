"""`python -m lowering` is the command `onnx-lowering`."""

import sys

from .commands.cli import main

sys.exit(main())
