"""The errors that a person can mend, and the exit codes that tell them apart."""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_READY = 3
EXIT_STORAGE = 4
EXIT_DIVERGED = 5
EXIT_NO_PROGRESS = 6
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: stopped early, nothing is queued to go on
EXIT_INTERRUPTED = 130


class UserError(Exception):
    """Say what is wrong, where, and what to do; shown without a traceback.

    `exit_code` is what the process ends with.
    """

    exit_code = EXIT_USAGE


class NotReadyError(UserError):
    """The request is right, but the machine, a service or an input is not there (yet)."""

    exit_code = EXIT_NOT_READY


class BadNodesError(NotReadyError):
    """Preflight found nodes unfit; `nodes` names those to blame, so that the next attempt can go elsewhere."""

    def __init__(self, message: str, nodes: list[str]) -> None:
        super().__init__(message)
        self.nodes = nodes


class StorageError(UserError):
    """The disk is full, read-only or gone."""

    exit_code = EXIT_STORAGE


class DivergedError(UserError):
    """The loss or the gradients are no longer finite."""

    exit_code = EXIT_DIVERGED
