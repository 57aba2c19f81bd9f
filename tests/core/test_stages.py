"""Stage timing: off by default, ordered when on."""

import time

import pytest

from moe_ep import stages


def test_nothing_is_recorded_unless_asked():
    with stages.stage("experts"), stages.stage("combine"):
        pass
    with stages.record() as recorder:
        pass
    assert recorder.durations_ms() == {}


def test_durations_come_by_name_in_order():
    with stages.record() as recorder:
        for pause in (0.002, 0.02):
            with stages.stage("route"):
                time.sleep(pause)
        with pytest.raises(KeyError), stages.stage("experts"):
            raise KeyError
    durations = recorder.durations_ms()
    assert list(durations) == ["route", "experts"]
    short, long = durations["route"]
    assert 2.0 <= short < long and long >= 20.0


def test_recorders_do_not_nest():
    with stages.record(), pytest.raises(RuntimeError, match="already"), stages.record():
        pass
