"""A pytest plugin: emulated kernels run under AddressSanitizer. The process must have its library preloaded."""

from functools import partial

from tests import emulator

emulator.install = partial(emulator.install, sanitize=True)
