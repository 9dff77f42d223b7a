"""Facts of the data that a statement rests on: how features were scaled, who shares a record."""

import pytest

from fedjax_dp.experiment import reading as configuration
from fedjax_dp.experiment import validate as validation

UNITS = {
    "record": ("--privacy.unit=record",),
    "client": ("--privacy.unit=client", "--algorithm.name=dp_fedavg"),
    "both": ("--privacy.unit=both", "--algorithm.name=dp_fedavg"),
    "none": ("--privacy.unit=none", "--algorithm.name=fedavg"),
}
TABLES = ("adult", "heart_disease", "kddcup99")


def checked(unit, name, *words):
    validation.validate(configuration.load(None, (*UNITS[unit], f"--data.name={name}", *words)))


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("unit", ["record", "client", "both"])
def test_exact_scaling_under_privacy_is_asked_for_by_its_name_or_refused(unit, name):
    with pytest.raises(ValueError, match=r"data\.options\.scaling must be given.*'range' scales"):
        checked(unit, name)
    for scaling in ("range", "standard"):
        checked(unit, name, f"--data.options.scaling={scaling}")


@pytest.mark.parametrize("name", TABLES)
def test_where_nothing_is_protected_tables_are_scaled_as_ever(name):
    checked("none", name)


def test_data_without_exact_scaling_are_not_asked():
    checked("record", "digits")
