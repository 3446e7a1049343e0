"""CUDA kernels, emulated on the CPU; on a GPU where there is one."""
