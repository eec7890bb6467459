"""Planning without GPUs: the simulator, the emulated device, their workloads and pages."""
