"""The checker of tensor shapes and dtypes that conftest.py installs."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # An int is a float, as PEP 484 has it.
