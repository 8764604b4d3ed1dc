"""The error users see. Apart from `types`, which loads numpy: `fedgft --help` needs none of it."""


class FedgftError(ValueError):
    """Something the user can mend: one line that names the argument, file or column."""
