"""Stage timing: off by default, ordered when on."""

import contextlib
import weakref
from types import SimpleNamespace

import pytest
import torch

from moe_ep.observability import stages


def test_nothing_is_recorded_unless_asked():
    with stages.stage("experts"), stages.stage("combine"):
        pass
    with stages.record() as recorder:
        pass
    assert recorder.durations_ms() == {}


def test_durations_come_by_name_in_order(monkeypatch):
    clock = iter([1.0, 1.25, 2.0, 2.5, 3.0, 3.0])
    monkeypatch.setattr(stages, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with stages.record() as recorder:
        for _ in range(2):
            with stages.stage("route"):
                pass
        with pytest.raises(KeyError), stages.stage("experts"):
            raise KeyError
    durations = recorder.durations_ms()
    assert list(durations.items()) == [("route", [250.0, 500.0]), ("experts", [0.0])]


def test_recorders_do_not_nest():
    with stages.record(), pytest.raises(RuntimeError, match="already"), stages.record():
        pass


class Heard(stages.Listener):
    """Names of stages, as they begin and end."""

    def __init__(self):
        self.names = []

    @contextlib.contextmanager
    def span(self, name):
        self.names.append(name)
        yield
        self.names.append(f"end of {name}")


def test_listeners_come_and_go_by_themselves():
    first, second = Heard(), Heard()
    with stages.listening(first):
        with stages.listening(second), stages.stage("route"):
            pass
        with stages.stage("experts"):
            pass
    with stages.stage("combine"):
        pass
    assert first.names == ["route", "end of route", "experts", "end of experts"]
    assert second.names == ["route", "end of route"]


def test_what_a_graph_records_into_outlives_whoever_asked(monkeypatch):
    class Event:
        def __init__(self, **settings):
            self.settings, self.recorded = settings, 0

        def record(self):
            self.recorded += 1

    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    captured = weakref.ref(stages.timing_event())
    assert captured() is not None
    assert captured().settings == {"enable_timing": True, "external": True}
    assert captured().recorded == 1
    capturing = False
    eager = weakref.ref(stages.timing_event())
    assert eager() is None
