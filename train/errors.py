"""What ends a run early, each with one sentence for the user."""


class Refusal(ValueError):
    """The run can't start as asked; nothing was written."""

    exit_code = 2


class Stopped(RuntimeError):
    """The run started and can't go on."""

    exit_code = 1
