"""Kernels on the tile registers of AMX (isa.Isa.tiles), in instructions or emulated on any machine."""
