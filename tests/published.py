"""Published figures that the cost model and the advice are held against."""

from draftsmith.eval.service import Acceptance, DraftCost, Hardware, ProposerFacts, StepCost

# AMD, Qwen3-8B with an EAGLE-3 head on MATH-500: mean acceptance length of chains of 1 .. 7 tokens
AMD_LENGTHS = [1.89, 2.64, 3.27, 3.75, 4.14, 4.43, 4.68]
AMD_RECOVERED = [0.890, 0.875, 0.867, 0.856, 0.849, 0.842, 0.839]

# EAGLE-3 paper, vLLM, Llama-3.1-8B on one A100, chains of 2: speed-up by batch size
VLLM_CHAIN2 = {2: 1.75, 4: 1.68, 8: 1.58, 16: 1.49, 24: 1.42, 32: 1.36, 48: 1.21, 56: 1.01}
VLLM_TAU = 2.2
# and in SGLang on an H100, chains of 3
SGLANG_CHAIN3 = {2: 1.81, 4: 1.82, 8: 1.62, 16: 1.48, 24: 1.39, 32: 1.32, 48: 1.38, 56: 1.34, 64: 1.38}

# Llama-3.1-8B in bfloat16 on an H100: what of its bandwidth and arithmetic a dense decoder gets
H100 = Hardware(
    weights=16.06e9, parameters=8.03e9, cache_per_token=131072, bandwidth=0.85 * 3.35e12, flops=0.45 * 989e12, overhead=0.0005
)
CONTEXT = 640
ROOFLINE = {1: 2.4, 32: 2.4, 64: 2.26, 128: 1.5, 256: 1.06, 512: 0.80}  # chains of 3 with τ 2.93
ROOFLINE_TAU = 2.93


def chain(name: str, tau: float, length: int, **more: object) -> ProposerFacts:
    """A proposer of this τ at this length, all positions alike."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(length + 1)) < tau else (low, middle)
    acceptance = [Acceptance(rate=low, low=0.98 * low, high=min(1.02 * low, 1.0))] * length
    return ProposerFacts.model_validate({"name": name, "acceptance": acceptance, **more})


def step_costs(speedups: dict[int, float], tau: float, length: int) -> list[StepCost]:
    """The passes that gave these speed-ups, the drafting in them; a plain pass takes 10 ms and 0.1 ms more a sequence."""
    plain = {batch: 0.010 + 0.0001 * batch for batch in speedups}
    return [
        StepCost(tokens=tokens, batch=batch, seconds=seconds)
        for batch, speedup in speedups.items()
        for tokens, seconds in ((1, plain[batch]), (length + 1, plain[batch] * tau / speedup))
    ]


FREE = [DraftCost(batch=1, length=1, seconds=0.0)]
