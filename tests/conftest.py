from __future__ import annotations

import signal

# A shell starts its background jobs with SIGINT ignored, and children inherit that: Ctrl-C tests would test nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)
