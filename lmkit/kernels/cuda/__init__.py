"""CUDA C++ through CuPy: csrc/ has the kernels, every file here the ops of one kind and how they are launched."""
