"""The exceptions that a command shows as one line."""


class UsageError(ValueError):
    """A user's mistake. The message names the value and what is allowed; the command prints it alone, status 2."""


class InvalidExchange(ValueError):
    """What a collective gave cannot be used: values were NaN or Inf, left their type's range, or a message was damaged.

    Raised after a collective's last message, so that this member stays in step with the others, of which some may not
    have seen it. Whoever called it agrees with them on dropping the step.
    """


class RunFailed(RuntimeError):
    """A run that could not go on: a lost rank, a full disk. The command prints the message alone, status 1."""
