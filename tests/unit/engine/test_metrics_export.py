"""Refits as Prometheus metrics, from the status section."""

import pytest

prometheus_client = pytest.importorskip("prometheus_client")
pytest.importorskip("sglang")

LABELS = {"model_name": "m", "tp_rank": "0"}


def status(refit_id, *, consistent=True, replayed=0, native=1, seconds=0.5, nbytes=100):
    refit = {"id": refit_id, "seconds": seconds, "bytes": nbytes}
    return {
        "consistent": consistent,
        "replay": {"calls": replayed, "native_calls": native},
        "last_refit": refit,
        "kv_scales": None,
    }


@pytest.fixture
def exported():
    from sglang_fp8rl.engine.host.metrics import PREFIX, RefitMetrics

    registry = prometheus_client.CollectorRegistry()
    metrics = RefitMetrics(tuple(LABELS), registry)

    def value(name, **more):
        return registry.get_sample_value(PREFIX + name, {**LABELS, **more})

    return metrics, value


def test_calls_of_one_refit_are_one_refit(exported):
    metrics, value = exported
    for refit_id in (2, 2, 2, 3, 3, 5, 6):  # refits of 3, 2, 1 and 1 calls
        metrics.observe(LABELS, status(refit_id), "tensor", True)
    assert value("refits_total") == 4
    assert value("update_calls_total", source="tensor", outcome="ok") == 7


def test_a_failed_call_is_counted_as_failed(exported):
    metrics, value = exported
    metrics.observe(LABELS, status(1), "disk", False)
    assert value("update_calls_total", source="disk", outcome="failed") == 1
    assert value("update_calls_total", source="disk", outcome="ok") is None


def test_gauges_say_what_the_status_says(exported):
    metrics, value = exported
    metrics.observe(LABELS, status(1, consistent=False, replayed=3, native=1), None, True)
    assert value("consistent") == 0
    assert value("replayed_share") == 0.75
    assert value("refit_seconds") == 0.5
    assert value("refit_bytes") == 100
    metrics.observe(LABELS, status(1), None, True)
    assert value("consistent") == 1


def test_scales_of_the_kv_cache_are_gauges_where_there_are_any(exported):
    metrics, value = exported
    metrics.observe(LABELS, status(1), None, True)
    assert value("kv_certified") is None
    for certified, moves in ((False, 3), (True, 4)):
        kv = {"certified": certified, "moves": moves}
        metrics.observe(LABELS, status(1) | {"kv_scales": kv}, None, True)
        assert (value("kv_certified"), value("kv_scale_moves")) == (certified, moves)
