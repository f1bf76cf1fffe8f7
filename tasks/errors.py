"""The one exception that stands for a user's mistake."""


class UserError(ValueError):
    """A mistake in a command, a config or a file: its message is the one line the user sees.

    The message says what was wrong, what was expected and what to do. The command line prints it
    without a traceback and exits with status 2.
    """
