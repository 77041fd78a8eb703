"""The exceptions that a command shows as one line."""


class UsageError(ValueError):
    """A user's mistake. The message names the value and what is allowed; the command prints it alone, status 2."""


class RunFailed(RuntimeError):
    """A run that could not go on: a lost rank, a full disk. The command prints the message alone, status 1."""
