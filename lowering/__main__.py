"""The command `onnx-lowering`, as `python -m lowering`."""

import sys

from .commands.cli import main

sys.exit(main())
