"""Errors. Each text names what is wrong, the limit and the remedy."""


class Error(RuntimeError):
    """Whatever flashtune reports; ``status`` is the name of the library's status code."""

    status = "FLASHTUNE_STATUS_INTERNAL"

    def __init__(self, message, status=None):
        super().__init__(message)
        if status is not None:
            self.status = status


class InvalidArgument(Error, ValueError):
    """An argument outside of what is accepted."""

    status = "FLASHTUNE_STATUS_INVALID_ARGUMENT"


class InvalidTensor(InvalidArgument):
    """A tensor that does not fit the others or the device: dtype, shape, strides, device."""

    status = "FLASHTUNE_STATUS_INVALID_TENSOR"


class EngineClosed(Error):
    """The engine was closed."""

    status = "FLASHTUNE_STATUS_INVALID_HANDLE"


class Unsupported(Error, NotImplementedError):
    """What no kernel computes (yet). Nothing else is computed instead."""

    status = "FLASHTUNE_STATUS_UNSUPPORTED"


class Missing(Error):
    """A library, a driver or a compiler that is not on this machine."""

    status = "FLASHTUNE_STATUS_MISSING"


class Sealed(Error):
    """No stored kernel serves, and the policy forbids compiling."""

    status = "FLASHTUNE_STATUS_SEALED"


_OF_STATUS = {c.status: c for c in (InvalidArgument, InvalidTensor, EngineClosed, Unsupported, Missing, Sealed)}


def of_status(name, message):
    """The error for a status of the library."""
    return _OF_STATUS.get(name, Error)(message, name)
