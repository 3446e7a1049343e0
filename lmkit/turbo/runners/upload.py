"""Copies of the host's arrays on a device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lmkit.devices import holding


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device without a wait. The pinned memory is kept until the copy has been made."""
    tensor = torch.from_numpy(array)
    if not holding(device).own_memory or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
