"""A pytest plugin: emulated kernels run under AddressSanitizer, whose library the process must have preloaded."""

from functools import partial

from tests import emulator

emulator.install = partial(emulator.install, sanitize=True)
