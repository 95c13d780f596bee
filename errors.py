"""The one kind of failure a user can act on."""


class UserError(Exception):
    """A failure explained in one sentence that names the offending value and what to change.

    Entry points print it as `error: ...` and exit with a non-zero status, without a traceback.
    """
