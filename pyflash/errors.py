"""The exceptions that PyFlash adds to TypeError and ValueError."""


class Unsupported(NotImplementedError):
    """The request is meaningful but no kernel does it here. The message names what is nearest and works."""


class CompileError(RuntimeError):
    """NVRTC refused a kernel or is missing. The message ends with the compiler's log or with what to install."""


class LaunchError(RuntimeError):
    """The driver refused to load or launch a kernel."""
