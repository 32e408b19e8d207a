"""`python -m torch_grad_exporter` is `torch-grad-exporter`."""

import sys

from torch_grad_exporter.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
