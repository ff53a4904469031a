"""verl, by its own hook for external modules: losses of its actor, advantages of its driver."""

from trajreplay.capture.verl.wrapping import install, uninstall

__all__ = ["install", "uninstall"]
