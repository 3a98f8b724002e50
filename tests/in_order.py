"""In place of processes and threads: one after another, in this one."""

from contextlib import nullcontext


class InOrder(nullcontext):
    def __init__(self, *_):
        super().__init__(self)

    def submit(self, function, *args):
        return Done(function(*args))

    def map(self, function, values):
        return map(function, values)


class Done:
    def __init__(self, value):
        self.result = lambda: value
