"""Rules of the discrete-event kernel."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.sim.kernel import Kernel, Resource, all_of


def test_the_example_of_the_module_runs():
    """Two lorries share a narrow road: the second waits for the first."""
    kernel, road_log = Kernel(), []
    road = Resource(kernel, 1)

    def lorry(name):
        yield kernel.now_s + 2.0
        yield road.acquire()
        road_log.append((name, kernel.now_s))
        yield kernel.now_s + 1.0
        road.release()
        return name

    ends = [kernel.start(lorry(name)) for name in "ab"]
    assert kernel.run() == 4.0
    assert road_log == [("a", 2.0), ("b", 3.0)]
    assert [end.value for end in ends] == ["a", "b"]


@given(st.lists(st.lists(st.floats(0, 10), max_size=8), max_size=8))
def test_time_never_runs_back_and_ties_keep_their_order(naps):
    """Steps come in order of time; at one time, in the order in which they were asked for."""
    kernel, seen = Kernel(), []

    def sleeper(number, times):
        for nap_s in times:
            yield kernel.now_s + nap_s
            seen.append((kernel.now_s, number))

    for number, times in enumerate(naps):
        kernel.start(sleeper(number, times))
    kernel.run()
    assert [time for time, _ in seen] == sorted(time for time, _ in seen)
    assert len(seen) == sum(map(len, naps))
    first = [number for time, number in seen if time == 0.0]
    if all(len(times) == 1 for times in naps):
        assert first == sorted(first)


def test_run_until_stops_the_clock_there():
    """What is due at the limit runs, what is due later does not, and the next run goes on."""
    kernel, seen = Kernel(), []
    for time_s in (1.0, 2.0, 3.0):
        kernel.call_at(time_s, lambda _, time_s=time_s: seen.append(time_s))
    assert kernel.run(until_s=2.0) == 2.0
    assert seen == [1.0, 2.0]
    kernel.run()
    assert seen == [1.0, 2.0, 3.0]
    assert kernel.num_events == 3


def test_an_event_wakes_all_who_wait_and_all_who_come_late():
    """Waiting before or after it happened makes no difference to the value."""
    kernel, got = Kernel(), []
    event = kernel.event()

    def waiter(at_s):
        yield at_s
        got.append((at_s, (yield event)))

    for at_s in (0.0, 5.0):
        kernel.start(waiter(at_s))
    kernel.call_at(1.0, lambda _: event.trigger("now"))
    kernel.run()
    assert got == [(0.0, "now"), (5.0, "now")]


def test_all_of_has_every_value():
    """In the order asked, once all have happened; of no events at once."""
    kernel = Kernel()
    events = [kernel.event() for _ in range(3)]
    both, none = all_of(kernel, events), all_of(kernel, [])
    for number, at_s in ((2, 1.0), (0, 2.0), (1, 3.0)):
        kernel.call_at(at_s, lambda _, number=number: events[number].trigger(number))
    kernel.run()
    assert (both.value, none.value) == ([0, 1, 2], [])


def test_misuse_is_refused():
    """The past, an event twice, a place released twice, a resource without slots."""
    kernel = Kernel()
    kernel.call_at(1.0, lambda _: None)
    kernel.run()
    with pytest.raises(ValueError, match="in the past"):
        kernel.call_at(0.5, lambda _: None)
    with pytest.raises(ValueError, match="in the past"):
        run_one(kernel, 0.5)
    event = kernel.event()
    event.trigger()
    with pytest.raises(RuntimeError, match="already triggered"):
        event.trigger()
    with pytest.raises(RuntimeError, match="already free"):
        Resource(kernel, 2).release()
    with pytest.raises(ValueError, match="capacity"):
        Resource(kernel, 0)


def run_one(kernel, time_s):
    def process():
        yield time_s

    kernel.start(process())
    kernel.run()


def line_that_yields():
    """Return the line of the `yield` in `_wrong`."""
    return inspect.getsourcelines(_wrong)[1] + 1


def _wrong(kernel, wrong):
    yield wrong


def _asks_another(kernel, wrong):
    yield kernel.now_s + 1.0
    yield from _wrong(kernel, wrong)


@pytest.mark.parametrize("process", [_wrong, _asks_another])
@pytest.mark.parametrize("wrong", [3, "soon", None, (1.0,)])
def test_a_process_that_yields_a_wrong_object_is_named_with_file_and_line(process, wrong):
    """The error names the line with the `yield`, also below `yield from`, and what to yield instead."""
    kernel = Kernel()
    kernel.start(process(kernel, wrong))
    with pytest.raises(TypeError) as raised:
        kernel.run()
    where = f"{__file__}:{line_that_yields()}: process '_wrong' yields {wrong!r} of type {type(wrong).__name__}"
    assert str(raised.value) == f"{where}: yield a time (a float in s on the kernel's clock) or an Event"


def test_a_callback_that_returns_a_wrong_object_is_named():
    """A function has no line at which it stands, so the error names the function."""
    kernel = Kernel()
    kernel.call_at(1.0, len, "ab")
    with pytest.raises(TypeError, match="len> returns 2 of type int: return a time"):
        kernel.run()


def test_a_bound_builtin_may_be_a_callback():
    """`list.append` returns None, which ends a callback but would be wrong for a process."""
    kernel, seen = Kernel(), []
    kernel.call_at(1.0, seen.append, "a")
    assert (kernel.run(), seen) == (1.0, ["a"])
