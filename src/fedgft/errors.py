"""What users are told. Apart from `types`, which loads numpy: `fedgft --help` needs none of it."""


class FedgftError(Exception):
    """Something the user can mend: one line that names the file, column or option."""
