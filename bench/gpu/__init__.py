"""Everything that a GPU can tell this project, in one command: see ``bench.gpu.gpu``."""
