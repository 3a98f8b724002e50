"""Reading what was recorded on a GPU."""

import pickle

import pytest


class PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, numbers and strings, and nothing that would run code."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"{module}.{name}: a snapshot holds plain data only")


@pytest.fixture(scope="session")
def recorded_events(snapshots):
    """A function from a recording's name to its events in order: +size for an allocation, -size for a release."""
    signs = {"alloc": 1, "free_completed": -1}

    def read(name):
        with open(snapshots / f"{name}.pickle", "rb") as file:
            (events,) = [trace for trace in PlainUnpickler(file).load()["device_traces"] if trace]
        return [signs[event["action"]] * event["size"] for event in events if event["action"] in signs]

    return read
