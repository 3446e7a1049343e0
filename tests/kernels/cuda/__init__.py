"""Tests of CUDA kernels. They run emulated on the CPU, and on a GPU if there is one."""
