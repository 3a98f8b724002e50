"""A notebook's parameters: wrong names and values stop it, with one line that says what would do."""

from __future__ import annotations

import pytest
import torch

from everybyte.parameters import (
    ParameterError,
    best_device,
    check,
    device_name,
    injected_names,
    number,
    one_of,
    positive_int,
    whole,
)


def message(namespace: dict[str, object], **kinds) -> str:
    with pytest.raises(ParameterError) as caught:
        check(namespace, **kinds)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_good_values_come_back_as_the_kinds_return_them(monkeypatch):
    monkeypatch.delenv("EVERYBYTE_DEVICE", raising=False)
    checked = check({"batch_size": 4, "device": "auto"}, batch_size=positive_int, device=device_name)
    assert checked.batch_size == 4
    assert checked.device == "cpu"


def test_an_injected_name_that_is_not_declared_is_refused_and_the_near_one_named():
    history = ["", "batch_size = 8", "# Parameters\nbatchsize = 4\n"]
    said = message({"In": history, "batch_size": 8, "batchsize": 4}, batch_size=positive_int)
    assert said == "unknown parameter 'batchsize' (did you mean 'batch_size'?): this notebook takes batch_size"


def test_names_that_later_cells_assign_are_not_taken_for_parameters():
    history = ["", "batch_size = 8", "# Parameters\nbatch_size = 4\n", "check(...)", "total = 3"]
    assert check({"In": history, "batch_size": 4, "total": 3}, batch_size=positive_int).batch_size == 4


def test_injected_names_are_read_from_every_kind_of_literal():
    cell = '# Parameters\na = 1\nb = "two"\nc = [3, {"four": None}]\n_d = float(\'nan\')\n'
    assert injected_names(["", cell, "e = 5"]) == ["a", "b", "c", "_d"]


def test_a_declared_name_without_a_default_is_an_error():
    assert "set its default in the parameters cell" in message({}, batch_size=positive_int)


@pytest.mark.parametrize("value", [0, -1, 8.0, "8", "eight", True, None])
def test_a_positive_int_is_nothing_else(value):
    said = message({"batch_size": value}, batch_size=positive_int)
    assert said == f"batch_size must be a whole number of at least 1, not {value!r}"


@pytest.mark.parametrize("value", [2, 65])
def test_whole_holds_to_both_bounds(value):
    kind = whole(at_least=3, at_most=64)
    assert kind(3) == 3
    assert kind(64) == 64
    with pytest.raises(ValueError, match="from 3 to 64, not"):
        kind(value)


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan"), float("inf"), "0.1", False])
def test_a_number_is_finite_and_within_its_bounds(value):
    kind = number(below=1.0)
    assert kind(0) == 0.0
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        kind(value)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_number_without_an_upper_bound_is_still_finite(value):
    with pytest.raises(ValueError):
        number()(value)


@pytest.mark.parametrize("value", ["published", 1, None])
def test_one_of_takes_what_is_listed_and_no_equal_of_another_type(value):
    kind = one_of("seed", True)
    assert kind("seed") == "seed"
    with pytest.raises(ValueError, match="one of 'seed', True, not"):
        kind(value)


def test_auto_is_what_the_environment_says(monkeypatch):
    monkeypatch.setenv("EVERYBYTE_DEVICE", "cuda")
    assert "from the environment variable EVERYBYTE_DEVICE" in message({"device": "auto"}, device=device_name)
    assert check({"device": "cpu"}, device=device_name).device == "cpu"
    monkeypatch.setenv("EVERYBYTE_DEVICE", "auto")
    assert check({"device": "auto"}, device=device_name).device == "cpu"


def test_cuda_is_refused_with_the_reason_and_another_name_without():
    assert message({"device": "cuda"}, device=device_name).endswith("compared with the kernels of the CPU")
    assert message({"device": "tpu"}, device=device_name) == "device must be 'cpu' or 'auto', not 'tpu'"


@pytest.mark.parametrize(("found", "auto"), [(True, "cuda"), (False, "cpu")])
def test_a_chapter_that_can_use_a_gpu_takes_it_where_there_is_one(monkeypatch, found, auto):
    monkeypatch.delenv("EVERYBYTE_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
    assert check({"device": "auto"}, device=best_device).device == auto
    assert check({"device": "cpu"}, device=best_device).device == "cpu"
    monkeypatch.setenv("EVERYBYTE_DEVICE", "cpu")
    assert check({"device": "auto"}, device=best_device).device == "cpu"


def test_cuda_is_refused_where_there_is_no_gpu_and_the_environment_named_if_it_asked(monkeypatch):
    monkeypatch.delenv("EVERYBYTE_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = message({"device": "cuda"}, device=best_device)
    assert said == "device must be 'cpu' or 'auto' here, not 'cuda': PyTorch finds no GPU"
    monkeypatch.setenv("EVERYBYTE_DEVICE", "cuda")
    assert "EVERYBYTE_DEVICE" in message({"device": "auto"}, device=best_device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert check({"device": "auto"}, device=best_device).device == "cuda"


def test_a_device_that_there_is_not_is_refused_whatever_is_found(monkeypatch):
    for found in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=found: found)
        assert message({"device": "tpu"}, device=best_device) == "device must be 'cpu', 'cuda' or 'auto', not 'tpu'"
