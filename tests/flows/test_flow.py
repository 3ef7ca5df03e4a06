"""A flow as users write it: what is refused, and what becomes of its options."""

import pytest

from streamq import App, Client, FleetTooOld, Flow, InvalidValue, Protocol, RequestExists
from streamq.flows.flow import flow_window_bounds
from streamq.queue.flow_policy import flow_policy, shares_of_stages
from tests.conftest import ONE_KIND

app = App()


@app.map
def shout(line: str) -> str:
    return line.upper()


def stranger(line: str) -> str:
    return line


def test_is_written_stage_by_stage_and_leaves_the_one_before_alone() -> None:
    one = app.flow("f").map(shout)
    two = one.map("size", limit=3)

    assert [stage.handler for stage in two.stages] == ["shout", "size"]
    assert len(one.stages) == 1
    assert repr(two) == "Flow('f').map('shout').map('size')"


def test_function_that_is_no_handler_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"stranger is no handler of this app; .*: shout"):
        app.flow("f").map(stranger)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"limitt": 3}, "has no option limitt"),
        ({"on_failure": "run"}, "on_failure is for a join or a reduce"),
        ({"limit": "many"}, "limit"),
    ],
)
def test_bad_option_of_a_stage_is_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(InvalidValue, match=why):
        app.flow("f").map(shout, **options)


def test_window_of_a_join_is_refused() -> None:
    with pytest.raises(InvalidValue, match="a join has no window"):
        app.flow("f").spread(shout).join(shout, window="3 parts")


def test_value_that_is_out_of_range_names_its_stage() -> None:
    with pytest.raises(InvalidValue, match=r"stage 2 \(shout\): limit 0 is out of range"):
        flow_policy(app.flow("f").map(shout).map(shout, limit=0), {})


@pytest.mark.parametrize(
    ("text", "meant"),
    [(None, (10_000, 2**26)), ("2000 parts", (2_000, 0)), (7, (7, 0)), ("1 MiB", (10**9, 2**20))],
)
def test_window(text: str | int | None, meant: tuple[int, int]) -> None:
    assert flow_window_bounds(text) == meant


def test_stages_share_the_weight_of_one_request_and_the_last_has_most() -> None:
    assert [shares_of_stages(stages, 8) for stages in (1, 2, 3, 5)] == [
        [8],
        [3, 5],
        [2, 2, 4],
        [2, 2, 2, 2, 4],
    ]
    assert shares_of_stages(2, 16) == [6, 10]


@ONE_KIND
class TestSubmit:
    def test_takes_a_handler_or_a_flow(self, client: Client) -> None:
        with pytest.raises(InvalidValue, match="either a handler or a flow"):
            client.submit(["a"])
        with pytest.raises(InvalidValue, match="either a handler or a flow"):
            client.submit(["a"], handler="h", flow=app.flow("f").map(shout))

    def test_flow_without_stages_is_refused_and_nothing_is_there(
        self, client: Client, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        with pytest.raises(InvalidValue, match="flow f: a flow needs a stage"):
            client.submit(["a"], flow=Flow("f"), id=request_id, queue=queue)
        assert protocol.places(queue) == []

    def test_old_worker_in_the_fleet_is_named(
        self, client: Client, protocol: Protocol, queue: str
    ) -> None:
        details = b'{"name":"old","version":"0.9"}'
        protocol.beat(queue, "old", 60_000, details)

        with pytest.raises(FleetTooOld, match=rf"queue {queue}.*such as old \(streamq 0.9\)"):
            client.submit(["a"], flow=app.flow("f").map(shout), queue=queue)
        assert protocol.places(queue) == []

    def test_same_again_finds_it_and_another_shape_is_another(
        self, client: Client, protocol: Protocol, queue: str, request_id: str
    ) -> None:
        flow = app.flow("f").map(shout).map(shout)
        client.submit(["a"], flow=flow, id=request_id, queue=queue)

        client.submit(["a"], flow=flow, id=request_id, queue=queue)
        with pytest.raises(RequestExists, match="other options"):
            client.submit(["a"], flow=flow.map(shout), id=request_id, queue=queue)

        assert protocol.places(queue) == [request_id, f"{request_id}/2"]
        assert protocol.ids(queue) == [request_id]

    def test_pause_resume_and_set_reach_every_stage(
        self, client: Client, protocol: Protocol, queue: str
    ) -> None:
        flow = app.flow("f").map(shout).map("size")
        request = client.submit(["a"], flow=flow, queue=queue)
        later = protocol.keys(f"{request.id}/2")

        request.pause()
        assert [each.paused for each in request.status().stages or []] == [True, True]
        request.resume()
        request.set(limit=3, stage="size")
        request.set(level=7)

        stages = request.status().stages or []
        assert [(each.level, each.limit, each.paused) for each in stages] == [
            (7, 8, False),
            (7, 3, False),
        ]
        with pytest.raises(InvalidValue, match="no stage 'nowhere': shout, size"):
            request.set(limit=3, stage="nowhere")
        assert request.cancel() == 1
        request.purge()
        assert not protocol.connection.redis.exists(later.meta)
        assert protocol.places(queue) == []
