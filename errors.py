"""The one exception that means: the user can mend this."""


class UserError(Exception):
    """A user's mistake, told in one sentence that names the file, key or flag and the mend.

    The command line prints the sentence alone and exits with status 2.
    """


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its kind where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
