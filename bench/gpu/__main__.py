"""``python -m bench.gpu`` is ``python -m bench.gpu.run``."""

import sys

from bench.gpu.run import main

sys.exit(main())
