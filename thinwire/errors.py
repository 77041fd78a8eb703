"""The one exception that means "you asked for something that cannot be": one line on a terminal, status 2."""


class UsageError(ValueError):
    """A user's mistake. The message names the value and what is allowed; the command line prints it alone."""
