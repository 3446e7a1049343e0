"""A pytest plugin: emulated kernels run under AddressSanitizer, whose library the process must have preloaded."""

from functools import partial

from lmkit.kernels.cuda import emulation

emulation.install = partial(emulation.install, sanitize=True)
