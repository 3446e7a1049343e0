"""Facts about products, from their makers' data sheets. Nothing here was measured by us.

Sources: NVIDIA's data sheets of A100 80GB (SXM), H100 (SXM), H200, L4 and DGX B200, and the white papers "NVIDIA A100
Tensor Core GPU Architecture", "NVIDIA H100 Tensor Core GPU Architecture" and "NVIDIA Ada GPU Architecture". B200's
multiprocessors, clock and L2 cache stand in no data sheet; they are what its driver reports, as published by others.
The rate of its tensor cores is that of a lower clock, 1.86 GHz.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.roofline import Peak
from lmkit.kernels.cuda.gpus import EARLY_CAPABILITY, Capability


@dataclass(frozen=True)
class Datasheet:
    """A product. Rates are peaks at boost clock."""

    name: str
    capability: Capability
    gbytes_per_s: float  # of memory
    tflops: float  # of bfloat16 with float32 sums, dense
    sms: int
    ghz: float
    l2_mb: int
    memory_gb: int

    @property
    def peak(self) -> Peak:
        return Peak(1e9 * self.gbytes_per_s, 1e12 * self.tflops)

    @property
    def launch(self) -> float:
        """Seconds that a kernel of a graph costs beside its work. Where kernels overlap, most of its drain and fill is
        hidden. Estimates: 1.2 us is what gemm_plan.py takes."""
        return 0.5e-6 if self.capability >= EARLY_CAPABILITY else 1.2e-6


DATASHEETS = (
    Datasheet("H100", (9, 0), 3350, 989, 132, 1.83, 50, 80),
    Datasheet("H200", (9, 0), 4800, 989, 132, 1.83, 50, 141),
    Datasheet("A100", (8, 0), 2039, 312, 108, 1.41, 40, 80),
    Datasheet("L4", (8, 9), 300, 121, 58, 2.04, 48, 24),
    Datasheet("4090", (8, 9), 1008, 165.2, 128, 2.52, 72, 24),
    Datasheet("B200", (10, 0), 8000, 2250, 148, 1.97, 126, 180),
)
