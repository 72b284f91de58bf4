"""Pages of /metrics as engines write them, read and subtracted."""

import pytest

from draftsmith.eval.engine_metrics import Spans, read_metrics


def vllm(requests: int, ttft: tuple[int, float], drafts: int = 0, at: tuple[int, ...] = (), started: float = 100.0) -> str:
    """Two replicas' page; the second one is idle but for a request that runs."""
    count, seconds = ttft
    lines = [
        "# HELP vllm:request_success_total Count of successfully processed requests.",
        "# TYPE vllm:request_success_total counter",
        f'vllm:request_success_total{{engine="0",finished_reason="stop",model_name="a \\"b\\" }}"}} {requests - 1}.0',
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 1.0',
        'vllm:request_success_created{engine="0",finished_reason="stop",model_name="m"} 1.7e+09',
        'vllm:num_requests_running{engine="0"} 2.0',
        'vllm:num_requests_running{engine="1"} 1.0',
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0',
        'vllm:num_requests_waiting{engine="0"} 4.0',
        'vllm:kv_cache_usage_perc{engine="0"} 0.25',
        'vllm:kv_cache_usage_perc{engine="1"} 0.75',
        f'vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf"}} {count}',
        f'vllm:time_to_first_token_seconds_count{{engine="0"}} {count}',
        f'vllm:time_to_first_token_seconds_sum{{engine="0"}} {seconds}',
        f"process_start_time_seconds {started}",
        "vllm:generation_tokens_total NaN",
        "vllm:prompt_tokens_total soon",
        "a line that is none",
    ]
    if at:
        lines += [
            f"vllm:spec_decode_num_drafts_total {drafts}",
            f"vllm:spec_decode_num_draft_tokens_total {drafts * len(at)}",
            f"vllm:spec_decode_num_accepted_tokens_total {sum(at)}",
        ]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{name}{{engine="0",position="{k}"}} {at[k]}' for k in reversed(range(len(at)))]
    return "\n".join(lines) + "\n"


def test_a_vllm_page():
    found = read_metrics(vllm(7, (5, 2.5), drafts=10, at=(8, 4, 1)))
    assert found is not None and found.engine == "vllm"
    assert (found.requests, found.running, found.waiting, found.kv_cache) == (7, 3, 4, 0.75)
    assert found.ttft == Spans(5, 2.5) and Spans(5, 2.5).mean == 0.5 and found.tpot is None
    assert found.prompt_tokens is None and found.output_tokens is None  # neither is a number here
    assert found.speculating and found.accepted_at == (8, 4, 1) and found.tau == pytest.approx(2.3)


def test_what_was_counted_between_two_readings():
    earlier = read_metrics(vllm(7, (5, 2.5), drafts=10, at=(8, 4, 1)))
    later = read_metrics(vllm(9, (8, 3.1), drafts=30, at=(18, 14, 2)))
    assert earlier and later
    found = later.since(earlier)
    assert found and (found.requests, found.drafts, found.accepted, found.accepted_at) == (2, 20, 21, (10, 10, 1))
    assert found.ttft and found.ttft.count == 3 and found.ttft.mean == pytest.approx(0.2) and found.kv_cache == 0.75


@pytest.mark.parametrize("page", [vllm(3, (3, 1.0)), vllm(9, (9, 1.0), started=200.0)])
def test_a_restart_in_between_leaves_nothing_to_tell(page: str):
    earlier, later = read_metrics(vllm(7, (5, 2.5))), read_metrics(page)
    assert earlier and later and later.since(earlier) is None


def test_counters_that_first_appear_began_at_zero():
    earlier, later = read_metrics(vllm(7, (5, 2.5))), read_metrics(vllm(8, (6, 2.6), drafts=4, at=(3, 2)))
    assert earlier and later and not earlier.speculating and earlier.tau is None
    found = later.since(earlier)
    assert found and found.drafts == 4 and found.accepted_at == (3, 2)


def test_an_sglang_page():
    page = """\
sglang:num_running_reqs{model_name="m"} 162.0
sglang:num_queue_reqs{model_name="m"} 28.0
sglang:token_usage{model_name="m"} 0.28
sglang:num_requests_total{model_name="m"} 11228.0
sglang:prompt_tokens_total{model_name="m"} 8.128902e+06
sglang:generation_tokens_total{model_name="m"} 7.5e+06
sglang:time_to_first_token_seconds_sum{model_name="m"} 200.0
sglang:time_to_first_token_seconds_count{model_name="m"} 100.0
sglang:time_per_output_token_seconds_sum{model_name="m"} 8.0
sglang:time_per_output_token_seconds_count{model_name="m"} 100.0
sglang:spec_accept_length{model_name="m"} 2.8
sglang:spec_accept_rate{model_name="m"} 0.36
"""
    found = read_metrics(page)
    assert found and found.engine == "sglang" and found.speculating and found.tau == 2.8
    assert (found.running, found.waiting, found.kv_cache, found.requests) == (162, 28, 0.28, 11228)
    assert found.ttft and found.tpot and (found.ttft.mean, found.tpot.mean) == (2.0, 0.08)
    off = read_metrics(page.replace('_length{model_name="m"} 2.8', '_length{model_name="m"} 0.0'))
    assert off and not off.speculating and off.tau is None


@pytest.mark.parametrize("page", ["", "<html>", "go_goroutines 7\nprocess_start_time_seconds 1\n", "tgi:queue 3\n"])
def test_pages_of_others_tell_nothing(page: str):
    assert read_metrics(page) is None
